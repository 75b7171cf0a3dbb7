"""Documents that queries of every kind come near to."""

import numpy as np
import pytest

from models.encoder.packed.hubs import NEAREST, QUERIES, STRENGTH, USUAL, Hubs, nearness


def unit(rows: int, dim: int, seed: int, towards: float = 0.0) -> np.ndarray:
    """Vectors of all directions, or of those around the first dimension."""
    vectors = np.random.default_rng(seed).normal(size=(rows, dim)).astype(np.float32)
    vectors[:, 0] += towards
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


QUERIES_OF_ALL_KINDS, DOCUMENTS = unit(200, 32, seed=1, towards=4.0), unit(50, 32, seed=2, towards=2.0)
HUBS = Hubs.of(QUERIES_OF_ALL_KINDS, DOCUMENTS)


def test_nearness_is_the_mean_cosine_of_the_nearest_queries() -> None:
    expected = np.sort(DOCUMENTS @ QUERIES_OF_ALL_KINDS.T, axis=1)[:, -NEAREST:].mean(axis=1)
    np.testing.assert_allclose(nearness(DOCUMENTS, QUERIES_OF_ALL_KINDS), expected, atol=1e-6)
    few = QUERIES_OF_ALL_KINDS[:3]
    np.testing.assert_allclose(nearness(DOCUMENTS, few), (DOCUMENTS @ few.T).mean(axis=1), atol=1e-6)
    assert nearness(DOCUMENTS[:0], few).shape == (0,)


def test_a_document_nearer_to_queries_than_usual_loses_and_a_farther_one_gains() -> None:
    near = nearness(DOCUMENTS, QUERIES_OF_ALL_KINDS)
    others = unit(300, 32, seed=3, towards=4.0)
    before, after = (others @ DOCUMENTS.T).mean(axis=0), (others @ HUBS.moved(DOCUMENTS).T).mean(axis=0)
    excess = near - HUBS.usual
    assert abs(excess.mean()) < 1e-6
    assert (np.sign(after - before) == -np.sign(excess))[np.abs(excess) > 0.05].all()
    # Unit length gives some of it back.
    slope = np.polyfit(excess, after - before, 1)[0]
    assert -STRENGTH <= slope < -0.3 * STRENGTH


def test_moved_documents_have_unit_length_and_usual_ones_stay() -> None:
    moved = HUBS.moved(DOCUMENTS)
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1, atol=1e-6)
    own = HUBS._replace(usual=float(nearness(DOCUMENTS[:1], QUERIES_OF_ALL_KINDS)[0]))
    np.testing.assert_allclose(own.moved(DOCUMENTS[:1]), DOCUMENTS[:1], atol=1e-6)


def test_a_document_is_moved_alike_alone_and_among_others() -> None:
    np.testing.assert_allclose(HUBS.moved(DOCUMENTS[7:8]), HUBS.moved(DOCUMENTS)[7:8], atol=1e-6)


def test_tensors_of_a_file_give_the_same_again() -> None:
    again = Hubs.read(HUBS.tensors())
    assert again is not None
    np.testing.assert_allclose(again.moved(DOCUMENTS), HUBS.moved(DOCUMENTS), atol=2e-4)
    assert HUBS.tensors().keys() == {QUERIES, USUAL}
    assert Hubs.read({}) is None


@pytest.mark.parametrize("dim", [8, 32])
def test_fewer_dimensions_are_the_first_ones_with_unit_length(dim: int) -> None:
    cut = HUBS.cut(dim)
    assert cut.usual == HUBS.usual
    np.testing.assert_allclose(np.linalg.norm(cut.queries, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(
        cut.queries * np.linalg.norm(HUBS.queries[:, :dim], axis=1, keepdims=True), HUBS.queries[:, :dim], atol=1e-6
    )
