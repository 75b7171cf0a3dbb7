"""Text to token ids, by the Rust `tokenizers` library alone. Knows nothing of the encoder that reads the ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer

from models.errors import BadEncoder

Ids = NDArray[np.int64]
FlatIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of one text, special tokens included, and whether the text was cut to fit."""

    ids: list[int]
    truncated: bool

    def __len__(self) -> int:
        return len(self.ids)


class Tokenizer:
    """Tokenises single texts and batches, cut at `max_length` tokens."""

    def __init__(self, backend: RustTokenizer, max_length: int) -> None:
        backend.no_padding()
        backend.enable_truncation(max_length)
        self._backend = backend
        self.max_length = max_length

    @classmethod
    def load(cls, path: Path, max_length: int) -> Tokenizer:
        try:
            return cls(RustTokenizer.from_file(str(path)), max_length)
        except Exception as error:  # the library raises plain Exception
            raise BadEncoder(f"{path}: not a tokenizer; export the encoder again") from error

    @classmethod
    def from_json(cls, content: str, max_length: int) -> Tokenizer:
        return cls(RustTokenizer.from_str(content), max_length)

    @property
    def vocabulary_size(self) -> int:
        return self._backend.get_vocab_size()

    def __call__(self, text: str) -> Tokens:
        encoding = self._backend.encode(text)
        return Tokens(encoding.ids, bool(encoding.overflowing))

    def batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [Tokens(e.ids, bool(e.overflowing)) for e in self._backend.encode_batch_fast(list(texts))]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Character spans of the tokens of the whole text, without special tokens and without a cut."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        # What was cut off follows in pieces; to turn the cutting off meanwhile would turn it off for other threads.
        return [span for piece in (encoding, *encoding.overflowing) for span in piece.offsets]


def pad(batch: Sequence[Tokens], pad_id: int = 0) -> tuple[Ids, Ids]:
    """Ids and attention mask, both (texts, longest), padded on the right."""
    longest = max(len(tokens) for tokens in batch)
    ids = np.full((len(batch), longest), pad_id, dtype=np.int64)
    mask = np.zeros((len(batch), longest), dtype=np.int64)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = tokens.ids
        mask[row, : len(tokens)] = 1
    return ids, mask


def flatten(batch: Sequence[Tokens]) -> tuple[FlatIds, FlatIds]:
    """The ids of all texts in one run, and the length of each."""
    lengths = np.fromiter((len(tokens) for tokens in batch), np.int32, len(batch))
    ids = np.fromiter(chain.from_iterable(tokens.ids for tokens in batch), np.int32, int(lengths.sum()))
    return ids, lengths


def pad_flat(ids: FlatIds, lengths: FlatIds, pad_id: int = 0) -> tuple[Ids, Ids]:
    """As `pad`, of texts that were flattened: a few array operations for any number of them."""
    present = np.arange(int(lengths.max())) < lengths[:, None]
    padded = np.full(present.shape, pad_id, np.int64)
    padded[present] = ids
    return padded, present.astype(np.int64)
