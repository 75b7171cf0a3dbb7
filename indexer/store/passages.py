"""Which document a passage belongs to, where in its text, and the hash of what the encoder read.

Files: `passages.documents.npy`, `passages.spans.npy`, `hashes.npy`. Knows neither the texts nor the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from indexer.errors import TooLarge
from indexer.store.arrays import Array, ArrayWriter, load_array

HASHES_FILE = "hashes.npy"
HASH_BYTES = 16
# Graphs of FAISS and the rows that a build remembers of known vectors are 32-bit numbers.
MOST_PASSAGES = 2**31 - 1
Span = tuple[int, int]


class PassagesWriter:
    """Streams the passages of documents that come in row order."""

    def __init__(self, folder: Path) -> None:
        self._documents = ArrayWriter(folder / "passages.documents.npy", "<i4")
        self._spans = ArrayWriter(folder / "passages.spans.npy", "<i4", (2,))
        self._hashes = ArrayWriter(folder / HASHES_FILE, "|u1", (HASH_BYTES,))

    def add(self, document_row: int, spans: Sequence[Span], hashes: Array) -> None:
        """`hashes` (spans, 16) uint8: what makes the next build able to reuse a vector."""
        if len(self._documents) + len(spans) > MOST_PASSAGES:
            raise TooLarge(f"more than {MOST_PASSAGES} passages: divide the corpus into several collections")
        if len(spans) != len(hashes):
            raise ValueError(f"{len(spans)} passages with {len(hashes)} hashes")
        self._documents.append([document_row] * len(spans))
        self._spans.append(spans)
        self._hashes.append(hashes)

    def release(self) -> None:
        """Gives up the open files of a build that failed."""
        for writer in (self._documents, self._spans, self._hashes):
            writer.release()

    def close(self) -> int:
        """Completes the files; returns the number of passages."""
        self._spans.close()
        self._hashes.close()
        return self._documents.close()


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

    def of(self, document_row: int) -> range:
        """The rows of a document's passages."""
        first, end = np.searchsorted(self.documents, [document_row, document_row + 1]).tolist()
        return range(first, end)

    def span(self, row: int) -> Span:
        """First and last-plus-one character of the passage in its document's text."""
        start, end = self._spans[row].tolist()
        return start, end


def load_hashes(folder: Path, count: int) -> Array:
    """The content hash of each passage, (passages, 16) uint8."""
    return load_array(folder / HASHES_FILE, "|u1", (count, HASH_BYTES))
