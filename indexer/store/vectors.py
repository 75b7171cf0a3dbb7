"""The passages' vectors and the FAISS index over them: queries in, passage rows out.

Files: `vectors.npy` (passages, dim) float16, `index.faiss` (the same values as float32, so that scores agree whichever
of the two answers). Knows nothing of documents or texts. A search changes nothing, so threads may share one index.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from indexer.store.arrays import Array, load_array
from indexer.store.columns import Mask
from indexer.store.errors import BadSnapshot

VECTORS_FILE = "vectors.npy"
INDEX_FILE = "index.faiss"

HNSW_LINKS = 32
HNSW_EF_CONSTRUCTION = 200
EF_SEARCH = 64
# A graph is walked through rows that the filter forbids, so a narrow filter finds ever less. Below this share of
# allowed rows, or this number of them, scoring each one exactly is quicker than walking far enough.
EXACT_SHARE = 0.02
EXACT_ROWS = 1000
EXACT_BLOCK = 8192
ADD_ROWS = 65_536

Scores = NDArray[np.float32]
Rows = NDArray[np.int64]


class IndexKind(StrEnum):
    """Exact search over every row, or an approximate walk over a graph."""

    FLAT = "flat"
    HNSW = "hnsw"


class VectorIndex:
    """Searches one snapshot's vectors by inner product, which for unit vectors is the cosine."""

    def __init__(self, kind: IndexKind, vectors: Array, index: faiss.Index) -> None:
        self.kind = kind
        self.values = vectors
        self._index = index

    @classmethod
    def open(cls, folder: Path, kind: IndexKind, passages: int, dim: int) -> VectorIndex:
        vectors = load_array(folder / VECTORS_FILE, "<f2", (passages, dim))
        path = folder / INDEX_FILE
        try:
            # Mapped, not read: processes that serve one snapshot share its pages.
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise BadSnapshot(f"{path} is not a readable FAISS index; build the snapshot again") from error
        expected = faiss.IndexHNSWFlat if kind is IndexKind.HNSW else faiss.IndexFlatIP
        if not isinstance(index, expected) or (index.ntotal, index.d) != (passages, dim):
            found = f"{type(index).__name__} {index.ntotal} × {index.d}"
            raise BadSnapshot(f"{path} holds {found}, expected {kind} {passages} × {dim}; build it again")
        return cls(kind, vectors, index)

    def search(
        self, queries: Scores, k: int, allowed: Mask | None = None, *, ef_search: int = EF_SEARCH
    ) -> tuple[Scores, Rows]:
        """The best `k` passages of each query: scores and rows, both (queries, k), best first.

        Where there are fewer, the row is −1 and the score −inf. `allowed` (passages,) leaves out rows for all
        queries alike. `ef_search` is how far the graph is searched; it is raised to `k`, and for a filter.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        if allowed is None:
            return self._search_index(queries, k, None, ef_search)
        count = int(np.count_nonzero(allowed))
        if count <= max(EXACT_ROWS, EXACT_SHARE * len(self.values)):
            return self._score_exactly(queries, k, np.flatnonzero(allowed))
        # FAISS's own type stubs do not know the Python wrappers of these constructors.
        selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))  # type: ignore[call-arg, arg-type]
        return self._search_index(queries, k, selector, math.ceil(max(ef_search, k) * len(allowed) / count))

    def _search_index(
        self, queries: Scores, k: int, selector: faiss.IDSelector | None, ef_search: int
    ) -> tuple[Scores, Rows]:
        if self.kind is IndexKind.HNSW:
            parameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]
                efSearch=max(ef_search, k), sel=selector
            )
        else:
            parameters = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
        scores, rows = self._index.search(queries, k, params=parameters)
        scores[rows < 0] = -np.inf
        return scores, rows

    def _score_exactly(self, queries: Scores, k: int, candidates: Rows) -> tuple[Scores, Rows]:
        scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
        rows = np.full((len(queries), k), -1, dtype=np.int64)
        found = min(k, len(candidates))
        if found:
            # In blocks, so that the float32 copies stay small however many rows are allowed.
            blocks = [candidates[start : start + EXACT_BLOCK] for start in range(0, len(candidates), EXACT_BLOCK)]
            every = np.concatenate([queries @ self.values[b].astype(np.float32).T for b in blocks], axis=1)
            order = np.argsort(-every, axis=1, kind="stable")[:, :found]
            scores[:, :found] = np.take_along_axis(every, order, axis=1)
            rows[:, :found] = candidates[order]
        return scores, rows


def build_index(vectors: Array, kind: IndexKind, path: Path) -> None:
    """Writes the FAISS index over `vectors` (passages, dim) float16."""
    dim = vectors.shape[1]
    index = _empty_hnsw(dim) if kind is IndexKind.HNSW else faiss.IndexFlatIP(dim)
    for start in range(0, len(vectors), ADD_ROWS):
        index.add(vectors[start : start + ADD_ROWS].astype(np.float32))
    faiss.write_index(index, str(path))


def _empty_hnsw(dim: int) -> faiss.IndexHNSWFlat:
    index = faiss.IndexHNSWFlat(dim, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
    return index


def limit_threads(count: int) -> None:
    """FAISS uses `count` threads in calls from this very thread: OpenMP keeps the number for each caller apart."""
    faiss.omp_set_num_threads(count)
