"""Training pairs: read, tokenised once, and dealt out as batches that depend on nothing but seed and step.

Everything is kept as flat arrays of token ids, so that a batch is one gather on the training device and an
epoch never meets the tokenizer again. Knows nothing of the encoder or the loss.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from models.errors import BadData
from models.tokenizer import Tokenizer

Rows = NDArray[np.int64]
Padded = tuple[torch.Tensor, torch.Tensor]
"""Ids and attention mask, both (texts, longest)."""
_OPENERS = {".gz": gzip.open, ".xz": lzma.open}


@dataclass(frozen=True, slots=True)
class Pair:
    """One training row: a query, texts that answer it, texts that do not."""

    query: str
    positives: list[str]
    negatives: list[str]
    source: str


def read_pairs(path: Path) -> Iterator[Pair]:
    """Rows {query, pos: [...], neg: [...], source} of a JSON-lines file, plain, .gz or .xz."""
    opener: Any = _OPENERS.get(path.suffix, open)
    try:
        file: IO[str] = opener(path, "rt", encoding="utf-8")
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, start=1):
            yield _parse(line, path, number)


def _parse(line: str, path: Path, number: int) -> Pair:
    try:
        row = json.loads(line)
        pair = Pair(row["query"], row["pos"], row.get("neg", []), row.get("source", path.stem))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BadData(f"{path}:{number}: not a training row {{query, pos, neg?, source?}}: {error!r}") from error
    texts = [pair.query, *pair.positives, *pair.negatives]
    if not pair.positives or not all(isinstance(text, str) and text for text in texts):
        raise BadData(f"{path}:{number}: query and pos must be non-empty strings, and pos must hold at least one")
    return pair


class TokenTable:
    """Token ids of many texts in one flat tensor on the training device."""

    def __init__(self, ids: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        self.ids, self.starts, self.lengths = ids, starts, lengths

    @classmethod
    def build(cls, texts: Sequence[str], tokenizer: Tokenizer, device: torch.device, label: str) -> TokenTable:
        flat: list[NDArray[np.int32]] = []
        lengths: list[int] = []
        chunk = 4096
        # Few texts have more than four characters to a token; cutting first spares the tokenizer what nobody reads.
        longest = 4 * tokenizer.max_length
        for first in tqdm(range(0, len(texts), chunk), desc=f"tokenise {label}", unit="chunk", disable=None):
            for tokens in tokenizer.batch([text[:longest] for text in texts[first : first + chunk]]):
                flat.append(np.asarray(tokens.ids, dtype=np.int32))
                lengths.append(len(tokens.ids))
        sizes = np.asarray(lengths, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        joined = torch.from_numpy(np.concatenate(flat))
        return cls(joined.to(device), torch.from_numpy(starts).to(device), torch.from_numpy(sizes).to(device))

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: torch.Tensor) -> Padded:
        """Ids and mask (rows, longest), padded on the right with 0."""
        return self._gather(self.starts[rows], self.lengths[rows])

    def cropped(self, rows: torch.Tensor, generator: np.random.Generator, most: int) -> Padded:
        """A random span of 4 to `most` - 2 tokens of each text, between the text's own first and last token."""
        device = self.starts.device
        inner = np.maximum(self.lengths[rows].cpu().numpy() - 2, 1)
        sizes = np.minimum(generator.integers(4, most - 1, size=len(inner)), inner)
        begins = (generator.random(len(inner)) * (inner - sizes + 1)).astype(np.int64)
        # The gather starts one token early and ends one late; both are then overwritten by the markers.
        ends = torch.from_numpy(sizes).to(device) + 1
        ids, mask = self._gather(self.starts[rows] + torch.from_numpy(begins).to(device), ends + 1)
        ids[:, 0] = self.ids[self.starts[rows]].long()
        ids[torch.arange(len(rows), device=device), ends] = self.ids[self.starts[rows] + self.lengths[rows] - 1].long()
        return ids, mask

    def _gather(self, starts: torch.Tensor, lengths: torch.Tensor) -> Padded:
        columns = torch.arange(int(lengths.max()), device=starts.device)
        mask = columns < lengths[:, None]
        where = (starts[:, None] + columns).clamp(max=len(self.ids) - 1)
        return self.ids[where].long() * mask, mask.long()


@dataclass(frozen=True)
class PairTable:
    """All pairs as rows into two token tables; `sources[name]` are the pair rows of one source."""

    queries: TokenTable
    documents: TokenTable
    positives: list[list[int]]
    negatives: list[list[int]]
    sources: dict[str, Rows]

    @classmethod
    def build(cls, files: Sequence[Path], tokenizers: tuple[Tokenizer, Tokenizer], device: torch.device) -> PairTable:
        """Reads the files; `tokenizers` cut queries and documents at their own lengths."""
        document_rows: dict[str, int] = {}
        queries: list[str] = []
        positives: list[list[int]] = []
        negatives: list[list[int]] = []
        sources: dict[str, list[int]] = {}
        for pair in (pair for path in files for pair in read_pairs(path)):
            sources.setdefault(pair.source, []).append(len(queries))
            queries.append(pair.query)
            positives.append([document_rows.setdefault(text, len(document_rows)) for text in pair.positives])
            negatives.append([document_rows.setdefault(text, len(document_rows)) for text in pair.negatives])
        if not queries:
            raise BadData(f"{', '.join(map(str, files))}: no training rows")
        return cls(
            TokenTable.build(queries, tokenizers[0], device, "queries"),
            TokenTable.build(list(document_rows), tokenizers[1], device, "documents"),
            positives,
            negatives,
            {name: np.asarray(rows, dtype=np.int64) for name, rows in sources.items()},
        )
