"""Searches the passages' vectors with FAISS, on the CPU or (CAGRA graphs) on a GPU: queries in, passage rows out.

Every score is the exact inner product with the stored vector; on a GPU the query is rounded to fp16.
"""

from __future__ import annotations

import math
from pathlib import Path

import faiss
import numpy as np

from indexer.store.arrays import Array, Mask, Rows, Scores
from indexer.store.faiss_index import FaissIndex, exact_index, open_index, require_gpu, untyped
from indexer.store.kinds import INDEX_FILE, IndexKind

# Short codes choose this many candidates, or this many times k; the vectors rank them.
RESCORED_ROWS = 200
RESCORED_SHARE = 4
# Up to this share or number of allowed rows, scoring each of them is quicker than searching enough lists.
EXACT_SHARE = 0.02
EXACT_ROWS = 1000
# A graph search also visits rows that the filter excludes. Each node of its depth takes as long as scoring this many
# rows (13 to 39 were measured, docs/benchmarks.md).
ROWS_PER_NODE = 16
# A GPU search keeps at most this many candidates in shared memory; a deeper search runs on the CPU.
MOST_DEPTH = 512
# Candidates are kept in groups of this size.
DEPTH_STEP = 32


class VectorIndex:
    """Searches one snapshot's vectors by inner product, which for unit vectors is the cosine. Threads may share it."""

    def __init__(self, kind: IndexKind, vectors: Array, index: FaissIndex, depth: int = 0) -> None:
        """`vectors` (passages, dim) float16; `depth` is the default (nodes of a graph, or lists), 0: the least."""
        self.kind = kind
        self.values = vectors
        self.depth = depth or kind.depths(len(vectors))[0]
        self.index = index
        self._is_graph = kind.is_graph
        self._exact = index if kind is IndexKind.FLAT else exact_index(vectors)

    @classmethod
    def open(cls, folder: Path, kind: IndexKind, vectors: Array, depth: int = 0) -> VectorIndex:
        return cls(kind, vectors, open_index(folder / INDEX_FILE, kind, exact_index(vectors)), depth)

    def search(
        self, queries: Scores, k: int, allowed: Mask | None = None, *, depth: int | None = None
    ) -> tuple[Scores, Rows]:
        """Finds the best `k` passages of each query: scores and rows (queries, k), best first; missing: −inf and −1.

        `allowed` (passages,) restricts the rows of all queries. `depth` is raised to what `k` and the filter need.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        selector = selector_of(allowed)
        depth = None if self.kind is IndexKind.FLAT else self.depth_for(k, allowed, depth)
        if depth is None:
            return self.search_exactly(queries, k, selector)
        if self._is_graph:
            parameters = untyped.SearchParametersHNSW(efSearch=depth, sel=selector)
        else:
            rabitq = self.kind is IndexKind.RABITQ
            of_kind = untyped.IVFRaBitQSearchParameters if rabitq else untyped.SearchParametersIVF
            parameters = untyped.IndexRefineSearchParameters(
                k_factor=max(RESCORED_ROWS, RESCORED_SHARE * k) / k,
                base_index_params=of_kind(nprobe=depth, sel=selector),
            )
        return marked(*self.index.search(queries, k, params=parameters))

    def depth_for(self, k: int, allowed: Mask | None, depth: int | None = None) -> int | None:
        """Returns the depth to search for `k` of the allowed rows; None if scoring each of them is quicker."""
        depth = depth or self.depth
        if allowed is not None:
            count = int(np.count_nonzero(allowed))
            depth = math.ceil(depth * len(allowed) / max(1, count))
            few = max(EXACT_ROWS, EXACT_SHARE * len(self.values))
            if count <= (ROWS_PER_NODE * depth if self._is_graph else few):
                return None
        return max(depth, k) if self._is_graph else depth

    def search_exactly(self, queries: Scores, k: int, selector: faiss.IDSelector | None = None) -> tuple[Scores, Rows]:
        """Returns the best `k` passages of each query, by scoring every row that `selector` admits."""
        return marked(*self._exact.search(queries, k, params=untyped.SearchParameters(sel=selector)))


class GpuGraph:
    """A snapshot's CAGRA graph on a GPU; the CPU index does what the GPU cannot. For one thread at a time."""

    def __init__(self, own: VectorIndex) -> None:
        """Copies links and vectors to the GPU; raises BadIndex if there is none."""
        self.kind = own.kind
        self.values = own.values
        self.search_exactly = own.search_exactly
        self._own = own
        self._resources = require_gpu()
        self._index = untyped.index_cpu_to_gpu(self._resources, 0, own.index)

    def search(
        self, queries: Scores, k: int, allowed: Mask | None = None, *, depth: int | None = None
    ) -> tuple[Scores, Rows]:
        """See VectorIndex.search."""
        far = self._own.depth_for(k, allowed, depth)
        if far is None or far > MOST_DEPTH:
            return self._own.search(queries, k, allowed, depth=depth)
        kept = -(-far // DEPTH_STEP) * DEPTH_STEP
        parameters = untyped.SearchParametersCagra(itopk_size=kept, sel=selector_of(allowed))
        halves = np.ascontiguousarray(queries, np.float16)
        return marked(*self._index.search(halves, k, params=parameters, numeric_type=untyped.Float16))


def selector_of(allowed: Mask | None) -> faiss.IDSelector | None:
    return None if allowed is None else untyped.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))


def marked(scores: Scores, rows: Rows) -> tuple[Scores, Rows]:
    """Returns what FAISS found, with score −inf in empty places."""
    scores[rows < 0] = -np.inf
    return scores, rows


def limit_threads(count: int) -> None:
    """Limits FAISS in calls from this thread: OpenMP keeps the number per calling thread."""
    faiss.omp_set_num_threads(count)
