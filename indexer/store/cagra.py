"""CAGRA: a graph that FAISS builds and walks on a graphics card, through cuVS.

It is kept as FAISS's `IndexHNSWCagra`, which a processor can walk too, from random nodes. On the card, queries and
vectors are fp16. Needs the FAISS of the gpu extra and a card; everything else of the store needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import faiss
import numpy as np

from indexer.store.arrays import Array
from indexer.store.errors import BadIndex

if TYPE_CHECKING:
    from indexer.store.columns import Mask
    from indexer.store.vectors import Rows, Scores, VectorIndex

untyped: Any = faiss

CAGRA_LINKS = 64
# A walk on the card keeps at most so many candidates in its quick memory; a search for more is left to the processor.
MOST_DEPTH = 512
# Candidates are kept in groups of this size.
DEPTH_STEP = 32


def build_graph(vectors: Array) -> Any:  # noqa: ANN401 - FAISS's own stubs do not know it
    """The graph over vectors (rows, dim) float16, built on the card and fetched from it."""
    resources = require_card()
    config = untyped.GpuIndexCagraConfig()
    config.graph_degree = CAGRA_LINKS
    config.intermediate_graph_degree = 2 * CAGRA_LINKS
    index = untyped.GpuIndexCagra(resources, vectors.shape[1], faiss.METRIC_INNER_PRODUCT, config)
    index.train(np.ascontiguousarray(vectors), numeric_type=untyped.Float16)
    graph = untyped.index_gpu_to_cpu(index)
    graph.base_level_only = True  # what the card built has no upper levels to descend by
    return graph


def require_card() -> Any:  # noqa: ANN401 - see above
    """FAISS's resources of the card; raises BadIndex where this FAISS knows none, or there is none."""
    if not has_card():
        raise BadIndex("cagra needs an NVIDIA card and the FAISS of the gpu extra; choose hnsw, or build it there")
    return untyped.StandardGpuResources()


def has_card() -> bool:
    return hasattr(faiss, "GpuIndexCagra") and untyped.get_num_gpus() > 0


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
