import math

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from models.evaluation.sets import RetrievalSet
from models.evaluation.studies import (
    FLAT,
    HARD_NEGATIVES,
    HNSW,
    IVF,
    POSITIVES,
    RANDOM_NEGATIVES,
    dimension_sweep,
    index_speed,
    similarities,
)

Embeddings = NDArray[np.float32]


def unit(rows: Embeddings) -> Embeddings:
    scaled: Embeddings = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def made_set(answers: list[dict[str, int]], documents: int) -> RetrievalSet:
    """Queries q0, q1 … with these grades, among documents d0, d1 …"""
    queries = [f"q{number}" for number in range(len(answers))]
    ids = [f"d{number}" for number in range(documents)]
    return RetrievalSet("made", ids, ids, queries, queries, dict(zip(queries, answers, strict=True)))


def test_a_vector_is_truncated_before_it_is_normalised() -> None:
    """The first 64 of 96 dimensions point to d1 by length and to d0 by direction; the others prefer d1."""
    query, first, second = np.zeros((3, 96), dtype=np.float32)
    query[[0, 80]] = 0.6, 0.8
    first[[0, 90]] = 0.1, math.sqrt(1 - 0.1**2)
    second[[0, 1, 80]] = 0.5, 0.5, math.sqrt(0.5)
    curve = dimension_sweep(made_set([{"d0": 1}], 2), "encoder", query[None], np.stack((first, second)))
    assert curve.points == [(64.0, 100.0), (96.0, pytest.approx(100 / math.log2(3)))]
    assert (curve.set_name, curve.system, curve.y_label) == ("made", "encoder", "nDCG@10")


def test_the_sweep_ends_at_the_whole_vector() -> None:
    vectors = unit(np.random.default_rng(0).normal(size=(20, 512)).astype(np.float32))
    curve = dimension_sweep(made_set([{f"d{n}": 1} for n in range(20)], 20), "encoder", vectors, vectors)
    assert curve.points == [(64.0, 100.0), (128.0, 100.0), (256.0, 100.0), (384.0, 100.0), (512.0, 100.0)]


def test_indexes_are_measured_against_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.evaluation.studies.TIMED_SECONDS", 0.01)
    generator = np.random.default_rng(1)
    centres = generator.normal(size=(40, 32))
    documents = unit(centres[generator.integers(0, 40, 2000)] + 0.4 * generator.normal(size=(2000, 32)))
    queries = unit(documents[:50] + 0.05 * generator.normal(size=(50, 32)))
    threads = faiss.omp_get_max_threads()
    flat, graph, lists = index_speed(made_set([{"d0": 1}] * 50, 2000), "encoder", queries, documents)
    assert faiss.omp_get_max_threads() == threads
    assert (flat.line, graph.line, lists.line) == (FLAT, HNSW, IVF)
    assert [recall for _, recall in flat.points] == [100.0]
    assert graph.labels == ["10", "20", "40", "80", "160"]
    assert lists.labels == ["1", "2", "4", "8", "16", "32"]
    for curve in (graph, lists):
        recalls = [recall for _, recall in curve.points]
        assert recalls[0] <= recalls[-1] + 1
        assert recalls[-1] > 95
    assert lists.points[0][1] < 100
    assert all(speed > 0 for curve in (flat, graph, lists) for speed, _ in curve.points)
    assert "2,000 documents" in flat.x_label


def test_a_large_corpus_is_represented_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.evaluation.studies.TIMED_SECONDS", 0.01)
    monkeypatch.setattr("models.evaluation.studies.INDEXED_DOCUMENTS", 100)
    documents = unit(np.random.default_rng(2).normal(size=(300, 16)).astype(np.float32))
    flat, *_ = index_speed(made_set([{"d0": 1}], 300), "encoder", documents[:1], documents)
    assert "100 documents" in flat.x_label


def test_equal_documents_do_not_cost_an_index_its_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.evaluation.studies.TIMED_SECONDS", 0.01)
    documents = np.tile(unit(np.ones((1, 8), dtype=np.float32)), (60, 1))
    *_, lists = index_speed(made_set([{"d0": 1}], 60), "encoder", documents[:1], documents)
    assert [recall for _, recall in lists.points] == [100.0]


def test_answers_are_compared_with_the_hardest_and_with_random_other_documents() -> None:
    """Cosines of the query with d0 … d3: 0.9 (answers), 0.7, 0.1, 0.1; a document of grade 0 does not answer."""
    cosines = np.array([0.9, 0.7, 0.1, 0.1], dtype=np.float32)
    documents = np.stack((cosines, np.sqrt(1 - cosines**2)), axis=1)
    query = np.array([[1.0, 0.0]], dtype=np.float32)
    answers, hardest, random = similarities(made_set([{"d0": 2, "d2": 0}], 4), "encoder", query, documents)
    assert (answers.line, hardest.line, random.line) == (POSITIVES, HARD_NEGATIVES, RANDOM_NEGATIVES)
    assert answers.points == [(0.86, 0.0), (0.9, 100.0), (0.94, 0.0)]
    assert hardest.points == [(0.66, 0.0), (0.7, 100.0), (0.74, 0.0)]
    filled = {x for x, share in random.points if share}
    assert filled <= {0.1, 0.7}
    assert sum(share for _, share in random.points) == pytest.approx(100)


def test_a_corpus_of_answers_only_has_no_other_documents() -> None:
    vectors = unit(np.ones((1, 4), dtype=np.float32))
    assert [curve.line for curve in similarities(made_set([{"d0": 1}], 1), "encoder", vectors, vectors)] == [POSITIVES]
