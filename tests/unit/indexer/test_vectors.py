"""Vector search: exact for flat indexes, close for approximate ones, and always within the filter."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from indexer.errors import BadIndex, BadSnapshot
from indexer.store.arrays import load_array
from indexer.store.faiss_index import build_index, exact_index, open_index
from indexer.store.kinds import IndexKind, list_count
from indexer.store.vectors import EXACT_ROWS, VectorIndex
from tests.unit.indexer.support import unit_vectors

ROWS, DIM = 6000, 32
KINDS = [kind for kind in IndexKind if kind is not IndexKind.CAGRA]  # needs a GPU
APPROXIMATE = [kind for kind in KINDS if kind is not IndexKind.FLAT]
# Kinds that accept a handful of vectors.
ANY_SIZE = [IndexKind.FLAT, IndexKind.HNSW]


def write(folder: Path, vectors: NDArray[np.float16], kind: IndexKind) -> VectorIndex:
    np.save(folder / "vectors.npy", vectors)
    build_index(vectors, kind, folder / "index.faiss")
    return VectorIndex.open(folder, kind, load_array(folder / "vectors.npy", "<f2", vectors.shape))


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float16]:
    return unit_vectors(ROWS, DIM, clusters=60)


@pytest.fixture(scope="module")
def indexes(vectors: NDArray[np.float16], tmp_path_factory: pytest.TempPathFactory) -> dict[IndexKind, VectorIndex]:
    return {kind: write(tmp_path_factory.mktemp(kind), vectors, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def queries(vectors: NDArray[np.float16]) -> NDArray[np.float32]:
    noisy = vectors[::120].astype(np.float32) + 0.05 * unit_vectors(50, DIM, seed=1).astype(np.float32)
    return noisy / np.linalg.norm(noisy, axis=1, keepdims=True)


def exact(
    vectors: NDArray[np.float16], queries: NDArray[np.float32], k: int, allowed: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    scores = queries @ vectors.astype(np.float32).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    rows = np.argsort(-scores, axis=1)[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


def recall(found: NDArray[np.int64], expected: NDArray[np.int64]) -> float:
    return float(np.mean([len(set(f) & set(e)) / len(e) for f, e in zip(found, expected, strict=True)]))


def test_a_flat_index_equals_exact_search_in_numpy(
    indexes: dict[IndexKind, VectorIndex], vectors: NDArray[np.float16], queries: NDArray[np.float32]
) -> None:
    scores, rows = indexes[IndexKind.FLAT].search(queries, 20)
    expected_scores, expected_rows = exact(vectors, queries, 20)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    assert recall(rows, expected_rows) > 0.999  # two rows of equal score may swap


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_recall_is_high_on_clustered_vectors(
    indexes: dict[IndexKind, VectorIndex], vectors: NDArray[np.float16], queries: NDArray[np.float32], kind: IndexKind
) -> None:
    scores, rows = indexes[kind].search(queries, 10)
    assert recall(rows, exact(vectors, queries, 10)[1]) > 0.98
    assert (np.diff(scores, axis=1) <= 0).all()


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_scores_are_exact_products_for_every_kind_of_index(
    indexes: dict[IndexKind, VectorIndex], vectors: NDArray[np.float16], queries: NDArray[np.float32], kind: IndexKind
) -> None:
    scores, rows = indexes[kind].search(queries, 10)
    products = np.einsum("qd,qkd->qk", queries, vectors.astype(np.float32)[rows])
    np.testing.assert_allclose(scores, products, atol=1e-6)


@pytest.mark.parametrize("kind", APPROXIMATE)
def test_a_greater_depth_gives_higher_recall(
    indexes: dict[IndexKind, VectorIndex], vectors: NDArray[np.float16], queries: NDArray[np.float32], kind: IndexKind
) -> None:
    expected = exact(vectors, queries, 10)[1]
    shallow, deep = (recall(indexes[kind].search(queries, 10, depth=depth)[1], expected) for depth in (1, 512))
    assert deep > 0.99
    assert not kind.has_lists or shallow < 0.9  # a graph visits at least k nodes, which may be enough


@pytest.mark.parametrize("rows", [1, 999, 1000, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_depths_ascend_and_stay_below_the_lists(kind: IndexKind, rows: int) -> None:
    depths = kind.depths(rows)
    assert depths == sorted(set(depths))
    assert kind is IndexKind.FLAT or depths[0] > 0
    assert not kind.has_lists or depths[-1] <= list_count(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.5, 0.2, 0.01])
def test_a_filter_is_respected_without_losing_recall(
    indexes: dict[IndexKind, VectorIndex],
    vectors: NDArray[np.float16],
    queries: NDArray[np.float32],
    kind: IndexKind,
    share: float,
) -> None:
    allowed = np.random.default_rng(2).random(ROWS) < share
    assert (np.count_nonzero(allowed) <= EXACT_ROWS) == (share == 0.01)
    scores, rows = indexes[kind].search(queries, 10, allowed)
    assert allowed[rows].all()
    expected_scores, expected_rows = exact(vectors, queries, 10, allowed)
    assert recall(rows, expected_rows) > 0.98
    if kind is IndexKind.FLAT:
        np.testing.assert_allclose(scores, expected_scores, atol=1e-6)


def test_allowed_rows_are_scored_directly_if_that_is_faster_than_the_graph(
    indexes: dict[IndexKind, VectorIndex],
) -> None:
    graph, rows = indexes[IndexKind.HNSW], np.arange(ROWS)
    assert graph.depth_for(10, rows % 10 != 0) == 72
    assert graph.depth_for(10, rows % 5 == 0) is None  # 320 nodes would take as long as 5,120 rows
    assert graph.depth_for(10, rows % 10 != 0, 512) is None
    assert indexes[IndexKind.RABITQ].depth_for(10, rows % 5 == 0, 8) == 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 3])
def test_fewer_rows_than_asked_for_are_marked(
    indexes: dict[IndexKind, VectorIndex], queries: NDArray[np.float32], kind: IndexKind, count: int
) -> None:
    allowed = np.zeros(ROWS, dtype=np.bool_)
    allowed[100 : 100 + count] = True
    scores, rows = indexes[kind].search(queries[:2], 5, allowed)
    assert rows.shape == scores.shape == (2, 5)
    assert set(rows[0, :count]) == set(range(100, 100 + count))
    assert (rows[:, count:] == -1).all()
    assert np.isneginf(scores[:, count:]).all()


@pytest.mark.parametrize("kind", ANY_SIZE)
def test_k_beyond_the_number_of_rows_returns_all_rows(tmp_path: Path, kind: IndexKind) -> None:
    vectors = unit_vectors(3)
    index = write(tmp_path, vectors, kind)
    scores, rows = index.search(vectors[:1].astype(np.float32), 10)
    assert sorted(rows[0, :3]) == [0, 1, 2]
    assert rows[0, 0] == 0
    assert (rows[0, 3:] == -1).all()
    assert np.isneginf(scores[0, 3:]).all()


def test_hnsw_searches_at_least_k_deep(indexes: dict[IndexKind, VectorIndex], queries: NDArray[np.float32]) -> None:
    _, rows = indexes[IndexKind.HNSW].search(queries, 200, depth=1)
    assert (rows >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_concurrent_searches_of_an_index_do_not_affect_each_other(
    indexes: dict[IndexKind, VectorIndex], queries: NDArray[np.float32], kind: IndexKind
) -> None:
    """Each thread has its own filter and depth: one search must not affect another."""
    masks = [np.random.default_rng(seed).random(ROWS) < 0.4 for seed in range(8)]
    alone = [indexes[kind].search(queries, 10, mask, depth=64 + i)[1] for i, mask in enumerate(masks)]
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(indexes[kind].search, queries, 10, mask, depth=64 + i)
            for _ in range(3)
            for i, mask in enumerate(masks)
        ]
    for call, expected in zip(calls, alone * 3, strict=True):
        np.testing.assert_array_equal(call.result()[1], expected)


def test_an_index_is_memory_mapped_so_that_processes_share_it(tmp_path: Path) -> None:
    index = write(tmp_path, unit_vectors(100), IndexKind.HNSW)
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "index.faiss") in maps
    assert str(tmp_path / "vectors.npy") in maps
    assert len(index.values) == 100


def test_non_contiguous_vectors_are_not_searched_in_place() -> None:
    with pytest.raises(ValueError, match="row by row"):
        exact_index(unit_vectors(10)[::-1])


def test_vectors_are_stored_once(tmp_path: Path) -> None:
    """The graph's file has only the links, and a flat index has no file."""
    (tmp_path / "flat").mkdir()
    vectors = unit_vectors(2000, 256)
    write(tmp_path, vectors, IndexKind.HNSW)
    assert (tmp_path / "index.faiss").stat().st_size < vectors.nbytes
    write(tmp_path / "flat", vectors, IndexKind.FLAT)
    assert [path.name for path in (tmp_path / "flat").iterdir()] == ["vectors.npy"]


def test_an_index_keeps_a_reference_to_its_vectors(tmp_path: Path) -> None:
    """FAISS reads the vectors in place, so the index must hold a reference to them."""
    for kind in ANY_SIZE:
        build_index(unit_vectors(500), kind, tmp_path / "index.faiss")
        index = open_index(tmp_path / "index.faiss", kind, exact_index(unit_vectors(500)))
        gc.collect()
        _, rows = index.search(unit_vectors(500)[:3].astype(np.float32), 1)
        assert rows[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [IndexKind.IVF_PQ, IndexKind.RABITQ])
def test_the_same_vectors_give_the_same_lists(tmp_path: Path, vectors: NDArray[np.float16], kind: IndexKind) -> None:
    for name in ("one", "two"):
        build_index(vectors, kind, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("kind", [IndexKind.IVF_PQ, IndexKind.RABITQ])
def test_too_few_vectors_for_lists_are_refused(tmp_path: Path, kind: IndexKind) -> None:
    with pytest.raises(BadIndex, match="needs 1000 passages, there are 999; choose flat"):
        build_index(unit_vectors(999), kind, tmp_path / "index.faiss")


@pytest.mark.parametrize("dim", [4, 18, 30])
def test_indexes_with_codes_accept_any_dimension(tmp_path: Path, dim: int) -> None:
    vectors = unit_vectors(1500, dim, clusters=20)
    index = write(tmp_path, vectors, IndexKind.IVF_PQ)
    assert recall(index.search(vectors[:20].astype(np.float32), 1)[1], np.arange(20).reshape(-1, 1)) > 0.9


def test_an_index_of_another_kind_or_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path, unit_vectors(10), IndexKind.HNSW)
    faiss.write_index(faiss.IndexFlatIP(16), str(tmp_path / "index.faiss"))
    with pytest.raises(BadSnapshot, match="holds IndexFlatIP 0 × 16, expected hnsw 10 × 16"):
        VectorIndex.open(tmp_path, IndexKind.HNSW, unit_vectors(10))
    build_index(unit_vectors(9), IndexKind.HNSW, tmp_path / "index.faiss")
    with pytest.raises(BadSnapshot, match="9 × 16, expected hnsw 10 × 16"):
        VectorIndex.open(tmp_path, IndexKind.HNSW, unit_vectors(10))
    (tmp_path / "index.faiss").write_bytes(b"not an index")
    with pytest.raises(BadSnapshot, match="not a readable FAISS index"):
        VectorIndex.open(tmp_path, IndexKind.HNSW, unit_vectors(10))
