"""Search depth chosen by recall; an index is refused if no depth is enough."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from indexer.build import BuildOptions, build
from indexer.checks import (
    Measured,
    choose_depth,
    measure_kinds,
    measure_recall,
    propose,
    recall_queries,
    sample_queries,
)
from indexer.errors import BadBuild
from indexer.store.arrays import Rows
from indexer.store.collection import Collection
from indexer.store.documents import Documents, DocumentsWriter
from indexer.store.faiss_index import build_index
from indexer.store.kinds import IndexKind
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from indexer.store.vectors import VectorIndex
from models.encoder.onnx import Vectors
from tests.support.fast_encoder import FastEncoder
from tests.unit.indexer.support import unit_vectors, write_lines

ROWS, DIM = 3000, 32


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float16]:
    return unit_vectors(ROWS, DIM, clusters=30)


@pytest.fixture(scope="module")
def queries() -> NDArray[np.float32]:
    return unit_vectors(60, DIM, seed=3, clusters=30).astype(np.float32)


def index(folder: Path, vectors: NDArray[np.float16], kind: IndexKind) -> VectorIndex:
    build_index(vectors, kind, folder / "index.faiss")
    return VectorIndex.open(folder, kind, vectors)


def test_recall_is_the_share_of_the_exact_ten(
    tmp_path: Path, vectors: NDArray[np.float16], queries: NDArray[np.float32]
) -> None:
    lists = index(tmp_path, vectors, IndexKind.RABITQ)
    shares = [measure_recall(lists, queries, depth) for depth in (1, 4, 76)]
    assert shares == sorted(shares)
    assert shares[0] < 0.9 < shares[2]
    expected = np.argsort(-(queries @ vectors.astype(np.float32).T), axis=1)[:, :10]
    found = lists.search(queries, 10, depth=1)[1]
    by_rows = np.mean([len(set(f) & set(e)) / 10 for f, e in zip(found, expected, strict=True)])
    assert shares[0] == pytest.approx(by_rows, abs=0.01)


@pytest.mark.parametrize("kind", [IndexKind.IVF_PQ, IndexKind.RABITQ])
def test_any_copy_of_a_repeated_vector_counts_as_found(tmp_path: Path, kind: IndexKind) -> None:
    """Forty copies of each vector, so that the centre of a list is the vector itself."""
    distinct = unit_vectors(50, DIM)
    lists = index(tmp_path, np.repeat(distinct, 40, axis=0), kind)
    assert measure_recall(lists, distinct.astype(np.float32), 76) == 1.0


def test_the_smallest_sufficient_depth_is_chosen(
    tmp_path: Path, vectors: NDArray[np.float16], queries: NDArray[np.float32]
) -> None:
    lists = index(tmp_path, vectors, IndexKind.RABITQ)
    depths = IndexKind.RABITQ.depths(ROWS)
    low, _ = choose_depth(lists, queries, 0.1)
    depth, recall = choose_depth(lists, queries, 0.97)
    assert low == depths[0]
    assert recall.at_10 >= 0.97
    assert recall.queries == 60
    assert all(measure_recall(lists, queries, less) < 0.97 for less in depths if less < depth)


class Graded:
    """An index that finds a given share of the ten best at each depth."""

    def __init__(self, kind: IndexKind, *shares: float) -> None:
        self.kind, self.values = kind, np.empty((ROWS, DIM), np.float16)
        self._shares = dict(zip(kind.depths(ROWS), shares, strict=False))

    def search(self, queries: Vectors, k: int, *, depth: int | None = None) -> tuple[Vectors, Rows]:
        scores = np.zeros(len(queries) * k, np.float32)
        scores[: round(self._shares[depth or 0] * len(scores))] = 1.0
        return scores.reshape(len(queries), k), np.zeros((len(queries), k), np.int64)

    def search_exactly(self, queries: Vectors, k: int) -> tuple[Vectors, Rows]:
        return np.ones((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)


def test_a_graph_is_searched_deeper_than_the_floor_needs(queries: NDArray[np.float32]) -> None:
    depth, recall = choose_depth(Graded(IndexKind.HNSW, 0.96, 0.995, 0.998), queries, 0.95)
    assert (depth, recall.at_10, recall.floor) == (256, 0.9983, 0.95)
    assert choose_depth(Graded(IndexKind.HNSW, 0.95, 0.96, 0.97, 0.98), queries, 0.95)[0] == 512
    assert choose_depth(Graded(IndexKind.RABITQ, 0.96, 0.99), queries, 0.95)[0] == 16
    with pytest.raises(BadBuild, match=r"finds 0\.940 "):
        choose_depth(Graded(IndexKind.HNSW, 0.9, 0.91, 0.92, 0.94), queries, 0.95)


def test_an_index_below_the_floor_is_refused(tmp_path: Path) -> None:
    """Unstructured directions: short codes and a few lists find few of them."""
    lists = index(tmp_path, unit_vectors(8000, 16, seed=1), IndexKind.IVF_PQ)
    with pytest.raises(BadBuild, match=r"the ivf-pq index finds 0\.\d+ .* the floor is 1: .*care index suggest"):
        choose_depth(lists, unit_vectors(50, 16, seed=2).astype(np.float32), 1.0)


def test_a_build_below_the_floor_leaves_no_version_but_keeps_its_shards(tmp_path: Path) -> None:
    rows = ({"_id": str(n), "text": f"第{n}种药的用法"} for n in range(1200))
    corpus, collection = write_lines(tmp_path / "c.jsonl", *rows), Collection(tmp_path / "collection")
    with pytest.raises(BadBuild, match="the floor is 1"):
        build([corpus], FastEncoder(), collection, BuildOptions(index=IndexKind.IVF_PQ, recall_floor=1.0))
    assert collection.versions() == []
    encoder = FastEncoder()
    queries = ("头痛怎么办", "发热", "骨折")
    options = BuildOptions(index=IndexKind.IVF_PQ, recall_floor=0.2, queries=queries)
    summary = build([corpus], encoder, collection, options)
    assert summary.encoded == 0
    assert encoder.texts == list(queries)
    assert summary.recall is not None
    assert summary.recall.queries == 3
    built = Manifest.read(summary.folder).built
    assert built.recall == summary.recall
    assert summary.recall.at_10 >= summary.recall.floor == 0.2
    assert Snapshot.open(summary.folder).vectors.depth == built.search_depth > 0


def test_recall_is_measured_with_the_query_encoder(tmp_path: Path) -> None:
    rows = ({"_id": str(n), "text": f"第{n}种药的用法"} for n in range(300))
    corpus = write_lines(tmp_path / "c.jsonl", *rows)
    documents, asking = FastEncoder(), FastEncoder("asking")
    options = BuildOptions(index=IndexKind.HNSW, queries=("头痛怎么办", "发热"), query_encoder=asking)
    build([corpus], documents, Collection(tmp_path / "collection"), options)
    assert asking.texts[-2:] == ["头痛怎么办", "发热"]
    assert not {"头痛怎么办", "发热"} & set(documents.texts)


def test_queries_are_titles_or_first_sentences(tmp_path: Path) -> None:
    writer = DocumentsWriter(tmp_path, ExitStack())
    for title, text in (
        ("高血压", "正文。"),
        ("", "头痛可由感冒引起。休息常能缓解。"),
        ("", "Asthma causes wheezing. It is common."),
        ("", "。" + "长" * 100),
    ):
        writer.add(f"{title}{text}", title, text, {})
    documents = Documents.open(tmp_path, writer.close())
    assert sample_queries(documents) == [
        "高血压",
        "头痛可由感冒引起",
        "Asthma causes wheezing",
        "。" + "长" * 63,
    ]
    assert sample_queries(documents, 2) == ["高血压", "。" + "长" * 63]


def test_recall_is_measured_with_halves_of_titles_and_sentences(tmp_path: Path) -> None:
    """A whole title leads a graph straight to its document, unlike real queries."""
    writer = DocumentsWriter(tmp_path, ExitStack())
    for title, text in (("高血压", "正文。"), ("", "Asthma causes wheezing. It is common.")):
        writer.add(f"{title}{text}", title, text, {})
    documents, encoder = Documents.open(tmp_path, writer.close()), FastEncoder()
    assert recall_queries(encoder, documents).shape == (2, encoder.spec.dim)
    assert encoder.texts == ["高血", "Asthma caus"]
    recall_queries(encoder, documents, ["头痛怎么办"])
    assert encoder.texts[2:] == ["头痛怎么办"]


def test_suggest_measures_every_kind(vectors: NDArray[np.float16], queries: NDArray[np.float32]) -> None:
    measured = {one.kind: one for one in measure_kinds(vectors, queries, 1_000_000, 0.9)}
    assert set(measured) == set(IndexKind) - {IndexKind.CAGRA}
    flat, graph, lists = (measured[kind] for kind in (IndexKind.FLAT, IndexKind.HNSW, IndexKind.RABITQ))
    assert flat.recall == 1.0
    assert flat.expected_ms == pytest.approx(flat.sample_ms * 1_000_000 / ROWS)
    assert flat.expected_bytes == 1_000_000 * DIM * 2
    assert graph.expected_bytes > flat.expected_bytes
    assert graph.expected_ms < 2 * graph.sample_ms
    assert lists.expected_bytes < flat.expected_bytes


def test_suggest_leaves_out_kinds_that_a_small_sample_cannot_train(queries: NDArray[np.float32]) -> None:
    kinds = [one.kind for one in measure_kinds(unit_vectors(500, DIM), queries, 500, 0.9)]
    assert kinds == [IndexKind.FLAT, IndexKind.HNSW]


def kind(name: IndexKind, recall: float | None, milliseconds: float, size: int) -> Measured:
    return Measured(name, recall, 0, milliseconds, milliseconds, size)


def test_the_fastest_kind_with_enough_recall_that_fits_memory_is_proposed() -> None:
    measured = [
        kind(IndexKind.FLAT, 1.0, 100, 1000),
        kind(IndexKind.HNSW, 0.99, 1, 1500),
        kind(IndexKind.IVF_PQ, None, 0.1, 100),
        kind(IndexKind.RABITQ, 0.96, 2, 200),
    ]
    assert propose(measured, 2000).kind is IndexKind.HNSW
    assert propose(measured, 1200).kind is IndexKind.RABITQ
    with pytest.raises(BadBuild, match="no kind fits into 0 MB: the smallest needs 0 MB; allow more"):
        propose(measured, 150)
