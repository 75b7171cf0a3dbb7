"""The passages' vectors and the index over them: queries in, passage rows out.

Files: `vectors.npy` (passages, dim) float16 and, unless the index is flat, `index.faiss`. Every score, whichever way
its row was found, is the exact inner product with the stored vector. Knows nothing of documents or texts. A search
changes nothing, so threads may share one index.
"""

from __future__ import annotations

import math
from pathlib import Path

import faiss
import numpy as np

from indexer.store.arrays import Array, Mask, Rows, Scores, load_array
from indexer.store.faiss_index import FaissIndex, exact_index, open_index, require_card, untyped
from indexer.store.kinds import INDEX_FILE, VECTORS_FILE, IndexKind

# Short codes choose this many candidates, or so many times k, and the vectors decide among them.
RESCORED_ROWS = 200
RESCORED_SHARE = 4
# A graph is walked through rows that the filter forbids, so a narrow filter finds ever less. Below this share of
# allowed rows, or this number of them, scoring each one exactly is quicker than walking far enough.
EXACT_SHARE = 0.02
EXACT_ROWS = 1000

# A walk on the card keeps at most so many candidates in its quick memory; a search for more is left to the processor.
MOST_DEPTH = 512
# Candidates are kept in groups of this size.
DEPTH_STEP = 32


class VectorIndex:
    """Searches one snapshot's vectors by inner product, which for unit vectors is the cosine."""

    def __init__(self, kind: IndexKind, vectors: Array, index: FaissIndex, depth: int = 0) -> None:
        """`index` over `vectors` (passages, dim) float16 is of the kind.

        `depth` is how far a search looks unless it is told (nodes of a graph, or lists); 0: the kind's least.
        """
        self.kind = kind
        self.values = vectors
        self.depth = depth or kind.depths(len(vectors))[0]
        self.index = index
        self._exact = index if kind is IndexKind.FLAT else exact_index(vectors)

    @classmethod
    def open(cls, folder: Path, kind: IndexKind, passages: int, dim: int, depth: int = 0) -> VectorIndex:
        vectors = load_array(folder / VECTORS_FILE, "<f2", (passages, dim))
        return cls(kind, vectors, open_index(folder / INDEX_FILE, kind, exact_index(vectors)), depth)

    def search(
        self, queries: Scores, k: int, allowed: Mask | None = None, *, depth: int | None = None
    ) -> tuple[Scores, Rows]:
        """The best `k` passages of each query: scores and rows, both (queries, k), best first.

        Where there are fewer, the row is −1 and the score −inf. `allowed` (passages,) leaves out rows for all
        queries alike. `depth` is raised to what `k` needs, and for a filter.
        """
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        selector = None if allowed is None else untyped.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        depth = self.depth_for(k, allowed, depth)
        if depth is None:
            return self.search_exactly(queries, k, selector)
        return self._search(queries, k, selector, depth)

    def depth_for(self, k: int, allowed: Mask | None, depth: int | None = None) -> int | None:
        """How far to search for `k` of the rows that are allowed; None where scoring each of them is quicker."""
        depth = depth or self.depth
        if allowed is not None:
            count = int(np.count_nonzero(allowed))
            if count <= max(EXACT_ROWS, EXACT_SHARE * len(self.values)):
                return None
            depth = math.ceil(depth * len(allowed) / count)
        return max(depth, k) if self.kind.is_graph else depth

    def search_exactly(self, queries: Scores, k: int, selector: faiss.IDSelector | None = None) -> tuple[Scores, Rows]:
        """The best `k` passages of each query for certain, by looking at every row that `selector` admits."""
        parameters = untyped.SearchParameters(sel=selector)
        return _marked(*self._exact.search(queries, k, params=parameters))

    def _search(self, queries: Scores, k: int, selector: faiss.IDSelector | None, depth: int) -> tuple[Scores, Rows]:
        if self.kind is IndexKind.FLAT:
            return self.search_exactly(queries, k, selector)
        if self.kind.is_graph:
            parameters = untyped.SearchParametersHNSW(efSearch=depth, sel=selector)
        else:
            of_kind = (
                untyped.IVFRaBitQSearchParameters if self.kind is IndexKind.RABITQ else untyped.SearchParametersIVF
            )
            rescored = max(RESCORED_ROWS, RESCORED_SHARE * k)
            parameters = untyped.IndexRefineSearchParameters(
                k_factor=rescored / k, base_index_params=of_kind(nprobe=depth, sel=selector)
            )
        return _marked(*self.index.search(queries, k, params=parameters))


class CardGraph:
    """The graph of a snapshot on the card; what the card cannot do is done by the snapshot's own index.

    For one thread at a time, as all of FAISS's objects there are.
    """

    def __init__(self, own: VectorIndex) -> None:
        """Copies links and vectors to the card; raises BadIndex where there is none."""
        self.kind = own.kind
        self.values = own.values
        self.search_exactly = own.search_exactly
        self._own = own
        self._resources = require_card()
        self._index = untyped.index_cpu_to_gpu(self._resources, 0, own.index)

    def search(
        self, queries: Scores, k: int, allowed: Mask | None = None, *, depth: int | None = None
    ) -> tuple[Scores, Rows]:
        """See VectorIndex.search. Scores are of fp16 queries."""
        far = self._own.depth_for(k, allowed, depth)
        if far is None or far > MOST_DEPTH:
            return self._own.search(queries, k, allowed, depth=depth)
        selector = None if allowed is None else untyped.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
        kept = -(-far // DEPTH_STEP) * DEPTH_STEP
        parameters = untyped.SearchParametersCagra(itopk_size=kept, sel=selector)
        halves = np.ascontiguousarray(queries, np.float16)
        scores, rows = self._index.search(halves, k, params=parameters, numeric_type=untyped.Float16)
        scores[rows < 0] = -np.inf
        return scores, rows


def _marked(scores: Scores, rows: Rows) -> tuple[Scores, Rows]:
    scores[rows < 0] = -np.inf
    return scores, rows


def limit_threads(count: int) -> None:
    """FAISS uses `count` threads in calls from this very thread: OpenMP keeps the number for each caller apart."""
    faiss.omp_set_num_threads(count)
