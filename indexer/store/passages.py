"""Which document a passage belongs to, where in its text, and the hash of what the encoder read.

Files: `passages.documents.npy`, `passages.spans.npy`, `hashes.npy`. Knows neither the texts nor the vectors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from indexer.store.arrays import Array, load_array, save_array

HASH_BYTES = 16
Span = tuple[int, int]


class PassagesWriter:
    """Collects the passages of documents that come in row order: 12 bytes a passage in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._documents = array("i")
        self._spans = array("i")

    def add(self, document_row: int, spans: Sequence[Span]) -> None:
        for span in spans:
            self._documents.append(document_row)
            self._spans.extend(span)

    def close(self) -> int:
        """Completes the files; returns the number of passages."""
        save_array(self._folder / "passages.documents.npy", self._documents, "<i4")
        save_array(self._folder / "passages.spans.npy", np.asarray(self._spans).reshape(-1, 2), "<i4")
        return len(self._documents)


class Passages:
    """`documents`: int32, passage row → document row, never falling, so a document's passages are neighbours."""

    def __init__(self, documents: Array, spans: Array) -> None:
        self.documents = documents
        self._spans = spans

    @classmethod
    def open(cls, folder: Path, count: int) -> Passages:
        return cls(
            load_array(folder / "passages.documents.npy", "<i4", (count,)),
            load_array(folder / "passages.spans.npy", "<i4", (count, 2)),
        )

    def __len__(self) -> int:
        return len(self.documents)

    def span(self, row: int) -> Span:
        """First and last-plus-one character of the passage in its document's text."""
        start, end = self._spans[row].tolist()
        return start, end


def save_hashes(folder: Path, hashes: Array) -> None:
    """`hashes` (passages, 16) uint8: what makes the next build able to reuse a vector."""
    save_array(folder / "hashes.npy", hashes, "|u1")


def load_hashes(folder: Path, count: int) -> Array:
    return load_array(folder / "hashes.npy", "|u1", (count, HASH_BYTES))
