"""Tokenises one text, a batch, or millions of texts in several processes, without torch or ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.pre_tokenizers import Split, WhitespaceSplit

from models.encoder.spec import TOKENIZER_FILE, Computed, EncoderSpec, Side, Variant, verify_file
from models.errors import BadEncoder

# Letters of Latin, Greek and Cyrillic, and digits; or anything else.
ESTIMATED_TOKEN = r"[0-9A-Za-z\u00c0-\u052f]{1,3}|."

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
    """Tokenises single texts and batches, cut at `max_length` tokens.

    The cut is ours: with the library's own, tokenizers 0.23.1 and 0.23.2 lose what lies beyond it, and that anything
    does. https://github.com/huggingface/tokenizers/issues/2091
    """

    def __init__(self, backend: RustTokenizer, max_length: int) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.max_length = max_length
        special = backend.encode("a").special_tokens_mask
        self._ending = len(special) - 1 - max((place for place, mark in enumerate(special) if not mark), default=-1)

    @classmethod
    def load(cls, path: Path, max_length: int) -> Tokenizer:
        try:
            return cls(RustTokenizer.from_file(str(path)), max_length)
        except Exception as error:  # the library raises plain Exception
            raise BadEncoder(f"{path}: not a tokenizer; export the encoder again, or name another file") from error

    @classmethod
    def from_json(cls, content: str, max_length: int) -> Tokenizer:
        return cls(RustTokenizer.from_str(content), max_length)

    @classmethod
    def estimated(cls, max_length: int) -> Tokenizer:
        """Counts tokens for an encoder whose tokenizer is not here; all its ids are 0.

        Three Latin, Greek or Cyrillic letters or digits make a token, as does any other character. The bundled
        encoder's own tokenizer, whose vocabulary is Chinese, counts 0.92 to 1.10 times as many in the example corpus;
        vocabularies made for English count fewer there.
        """
        backend = RustTokenizer(WordLevel({"?": 0}, unk_token="?"))
        backend.pre_tokenizer = Steps([WhitespaceSplit(), Split(Regex(ESTIMATED_TOKEN), "isolated")])
        return cls(backend, max_length)

    def to_json(self) -> str:
        """Returns what `from_json` reads."""
        return self._backend.to_str()

    @property
    def vocabulary_size(self) -> int:
        return self._backend.get_vocab_size()

    def __call__(self, text: str) -> Tokens:
        return self._cut(self._backend.encode(text).ids)

    def batch(self, texts: Sequence[str]) -> list[Tokens]:
        return [self._cut(encoding.ids) for encoding in self._backend.encode_batch_fast(list(texts))]

    def _cut(self, ids: list[int]) -> Tokens:
        """Returns the first tokens, and the special ones that end every text."""
        if len(ids) <= self.max_length:
            return Tokens(ids, truncated=False)
        kept = self.max_length - self._ending
        return Tokens(ids[:kept] + ids[len(ids) - self._ending :], truncated=True)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Character spans of the tokens of the whole text, without special tokens and without a cut."""
        # A long text takes seconds. Only a batch lets other threads run meanwhile.
        return list(self._backend.encode_batch([text], add_special_tokens=False)[0].offsets)


def pad(batch: Sequence[Tokens]) -> tuple[Ids, Ids]:
    """Returns ids and attention mask, both (texts, longest), padded on the right with 0."""
    return pad_flat(*flatten(batch))


def flatten(batch: Sequence[Tokens]) -> tuple[FlatIds, FlatIds]:
    """Returns the ids of all texts in one run, and the length of each."""
    lengths = np.fromiter((len(tokens) for tokens in batch), np.int32, len(batch))
    ids = np.fromiter(chain.from_iterable(tokens.ids for tokens in batch), np.int32, int(lengths.sum()))
    return ids, lengths


def pad_flat(ids: FlatIds, lengths: FlatIds) -> tuple[Ids, Ids]:
    """As `pad`, of texts that were flattened: a few array operations for any number of them."""
    present = np.arange(int(lengths.max())) < lengths[:, None]
    padded = np.zeros(present.shape, np.int64)
    padded[present] = ids
    return padded, present.astype(np.int64)


AT_ONCE = 4096
# Fewer are done before a process has begun.
MANY = 200_000

Flat = tuple[FlatIds, FlatIds]
"""The ids of some texts in one run, and the length of each."""

_own: list[Tokenizer] = []
"""A process's tokenizer, once it has one."""


def tokenise(chunks: Iterable[Sequence[str]], texts: int, tokenizer: Tokenizer, processes: int = 0) -> Iterator[Flat]:
    """Yields each chunk's tokens, in order. `texts` is their total number; 0 processes: one per core."""
    processes = processes or (len(os.sched_getaffinity(0)) if texts >= MANY else 1)
    if processes < 3:
        return (flatten(tokenizer.batch(chunk)) for chunk in chunks)
    return _by_processes(iter(chunks), tokenizer, processes)


def _by_processes(chunks: Iterator[Sequence[str]], tokenizer: Tokenizer, processes: int) -> Iterator[Flat]:
    # By a file: through its pipe, each process would have to read the tokenizer before the next one is started.
    with NamedTemporaryFile("w", encoding="utf-8", prefix="care-tokenizer-") as file, _single_threaded():
        file.write(tokenizer.to_json())
        file.flush()
        setup = (Path(file.name), tokenizer.max_length)
        with ProcessPoolExecutor(processes, get_context("spawn"), _begin, setup) as pool:
            ahead = [pool.submit(_flat, chunk) for chunk in islice(chunks, 2 * processes)]
            while ahead:
                yield ahead.pop(0).result()
                ahead.extend(pool.submit(_flat, chunk) for chunk in islice(chunks, 1))


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Limits processes started in this block to one thread each."""
    before = os.environ.copy()
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("RAYON_NUM_THREADS")
        os.environ.update(before)


def _begin(path: Path, max_length: int) -> None:
    _own.append(Tokenizer.load(path, max_length))


def _flat(chunk: Sequence[str]) -> Flat:
    return flatten(_own[0].batch(chunk))


CPU_PREFERENCE = (Variant.INT8, Variant.FP32)
GPU_PREFERENCE = (Variant.FP16, Variant.FP32)


class TextReader:
    """An encoder folder without its weights: tokenises texts; `fingerprint` names the function text → embedding."""

    def __init__(self, spec: EncoderSpec, variant: Computed, weights: str, tokenizer: Tokenizer) -> None:
        """`weights` is the file that, with the spec, decides about the vectors."""
        self.spec = spec
        self.variant = variant
        self.weights = weights
        self.fingerprint = spec.fingerprint(weights)
        self.tokenizer = tokenizer
        self._instructions = {side: spec.instruction(side) for side in Side}

    @staticmethod
    def open(folder: Path, *, device: str = "cpu") -> TextReader:
        """Opens an encoder folder whose weights another process holds on the device."""
        spec = EncoderSpec.load(folder)
        variant = best_variant(folder, device)
        return TextReader(spec, variant, variant.filename, open_tokenizer(folder, spec))

    def tokenize(self, texts: Sequence[str], side: Side) -> list[Tokens]:
        instruction = self._instructions[side]
        return self.tokenizer.batch([instruction + text for text in texts] if instruction else texts)


def open_tokenizer(folder: Path, spec: EncoderSpec) -> Tokenizer:
    if spec.address is not None and TOKENIZER_FILE not in spec.checksums:
        return Tokenizer.estimated(spec.max_length)
    return Tokenizer.load(verify_file(folder, TOKENIZER_FILE, spec), spec.max_length)


def has_graph(folder: Path) -> bool:
    """Returns whether the folder has an ONNX graph."""
    return any((folder / variant.filename).is_file() for variant in Variant)


def best_variant(folder: Path, device: str) -> Variant:
    """Returns the fastest of the folder's graphs on cpu or cuda."""
    preference = GPU_PREFERENCE if device.startswith("cuda") else CPU_PREFERENCE
    for variant in preference:
        if (folder / variant.filename).is_file():
            return variant
    names = " or ".join(variant.filename for variant in preference)
    raise BadEncoder(f"{folder}: no ONNX graph ({names}); care export makes one")
