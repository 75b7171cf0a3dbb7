"""Vectors of texts for curation: the encoder that reads them, a file that keeps them, and an index that grows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from models.curation.frame import hold
from models.encoder.spec import Side
from models.errors import BadEncoder
from models.evaluation.encoders import OpenEncoder, open_encoder

untyped: Any = faiss  # its stubs lack what Python adds to its classes
Vectors = NDArray[np.float32]
STORED = np.dtype("<f2")
LINKS, SEARCHED = 32, 64
"""Edges of a node of the graph, and nodes that a search of it looks at."""


@dataclass(frozen=True)
class TextEncoder:
    """`FOLDER[,name=value]`, as `care eval --encoder` takes it; opened when it is first needed."""

    place: str

    @cached_property
    def opened(self) -> OpenEncoder:
        return open_encoder(self.place)

    @property
    def fingerprint(self) -> str:
        return self.opened.fingerprint

    def read(self, texts: Sequence[str], side: Side) -> Vectors:
        """Unit vectors (texts, dim) in float16 precision, so that a file of them holds all that was compared."""
        vectors = self.opened.read(texts, side, self.opened.spec.instruction(side))
        if not (np.isfinite(vectors).all() and vectors.any(axis=1).all()):
            raise BadEncoder(f"{self.place}: gave a vector that is zero or not finite; export or train it again")
        return vectors.astype(STORED).astype(np.float32)


class RecordFile:
    """Rows of numbers in a file that only grows, and is cut back to what a killed run still knows."""

    def __init__(self, path: Path, width: int, dtype: np.dtype[Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._width, self._dtype = path, width, dtype

    def __len__(self) -> int:
        size = self._path.stat().st_size if self._path.exists() else 0
        return int(size // (self._width * self._dtype.itemsize))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from writing the file: two of them would mix their rows."""
        with self._path.open("ab") as file:
            hold(file, self._path, "--vectors")
            yield

    def cut(self, count: int) -> None:
        with self._path.open("ab") as file:
            file.truncate(min(count, len(self)) * self._width * self._dtype.itemsize)

    def append(self, rows: NDArray[Any]) -> None:
        with self._path.open("ab") as file:
            file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def load(self) -> NDArray[Any]:
        """All rows (rows, width), mapped."""
        if not len(self):
            return np.empty((0, self._width), self._dtype)
        return np.memmap(self._path, self._dtype, "r", shape=(len(self), self._width))


class GrowingIndex:
    """Finds the nearest of the vectors added so far: exactly up to `exact` of them, then by an HNSW graph.

    Memory: 4 bytes a dimension of a vector while it is exact, then 2 and 256 for the edges. Vectors enter the graph one
    by one, so that it depends on their order alone.
    """

    def __init__(self, dim: int, exact: int) -> None:
        self._index = untyped.IndexFlatIP(dim)
        self._exact = exact

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def is_exact(self) -> bool:
        return isinstance(self._index, untyped.IndexFlatIP)

    def add(self, vectors: Vectors) -> None:
        if self.is_exact and len(self) + len(vectors) > self._exact:
            before = self._index.reconstruct_n(0, len(self)) if len(self) else vectors[:0]
            self._index = untyped.IndexHNSWSQ(
                vectors.shape[1], untyped.ScalarQuantizer.QT_fp16, LINKS, untyped.METRIC_INNER_PRODUCT
            )
            self._index.hnsw.efSearch = SEARCHED
            vectors = np.concatenate([before, vectors])
        if self.is_exact:
            self._index.add(vectors)
        else:
            for at in range(len(vectors)):
                self._index.add(vectors[at : at + 1])

    def nearest(self, vectors: Vectors, count: int) -> tuple[Vectors, NDArray[np.int64]]:
        """Scores and places, best first: `count` of each vector, or as many as there are; place -1 if there is none."""
        scores, places = self._index.search(vectors, max(1, min(count, len(self))))
        return scores, places
