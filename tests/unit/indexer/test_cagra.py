"""CAGRA, the graph of the GPU, on a machine without one: it cannot be built, but an existing one is searched."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest

from indexer.errors import BadIndex
from indexer.store.faiss_index import build_index, has_gpu
from indexer.store.kinds import IndexKind
from indexer.store.vectors import GpuGraph, VectorIndex
from tests.unit.indexer.support import unit_vectors

ROWS, DIM = 3000, 32


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> VectorIndex:
    """Makes an index as the GPU leaves it: FAISS's class without the vectors; here the CPU builds the links."""
    folder = tmp_path_factory.mktemp("cagra")
    vectors = unit_vectors(ROWS, DIM, clusters=30)
    index = faiss.IndexHNSWCagra(DIM, 16, faiss.METRIC_INNER_PRODUCT)
    index.add(vectors.astype(np.float32))
    index.base_level_only = True
    faiss.write_index(index, str(folder / "index.faiss"), faiss.IO_FLAG_SKIP_STORAGE)
    return VectorIndex.open(folder, IndexKind.CAGRA, vectors, 256)


def queries(graph: VectorIndex) -> np.ndarray:
    return graph.values[::100].astype(np.float32)


def test_a_cpu_searches_the_graph(graph: VectorIndex) -> None:
    exact, _ = graph.search_exactly(queries(graph), 10)
    scores, rows = graph.search(queries(graph), 10)
    assert (scores >= exact[:, -1:] - 1e-5).mean() > 0.9
    products = np.einsum("qkd,qd->qk", graph.values[rows].astype(np.float32), queries(graph))
    np.testing.assert_allclose(scores, products, atol=1e-5)


def test_narrow_and_wide_filters_are_respected(graph: VectorIndex) -> None:
    for allowed in (np.arange(ROWS) % 2 == 0, np.arange(ROWS) < 20):
        _, rows = graph.search(queries(graph), 10, allowed)
        assert allowed[rows].all()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_building_without_a_gpu_is_refused_with_the_remedy(graph: VectorIndex, tmp_path: Path) -> None:
    with pytest.raises(BadIndex, match="choose hnsw"):
        build_index(graph.values, IndexKind.CAGRA, tmp_path / "index.faiss")
    with pytest.raises(BadIndex, match="gpu extra"):
        GpuGraph(graph)
    with pytest.raises(BadIndex, match="choose flat"):
        build_index(graph.values[:10], IndexKind.CAGRA, tmp_path / "index.faiss")


def test_narrow_filters_and_large_k_are_searched_deeper_or_exactly(graph: VectorIndex) -> None:
    assert graph.depth_for(10, None) == 256
    assert graph.depth_for(600, None) == 600
    assert graph.depth_for(10, np.arange(20_000) % 2 == 0) == 512
    assert graph.depth_for(10, np.arange(ROWS) < 20) is None
