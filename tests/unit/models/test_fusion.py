import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.fusion import Fusion, best_passages, fuse, fuse_reciprocal, fuse_scores, query_weight, reorder
from models.lexical import Ranking


def ranking(*pairs: tuple[int, float]) -> Ranking:
    return np.array([row for row, _ in pairs], np.int64), np.array([score for _, score in pairs], np.float32)


NOTHING = ranking()


def test_scores_are_normalised_weighted_and_added() -> None:
    rows, scores = fuse_scores(ranking((1, 0.9), (2, 0.7), (3, 0.5)), ranking((3, 8.0), (4, 4.0)), 0.6)
    assert rows.tolist() == [1, 3, 2, 4]
    np.testing.assert_allclose(scores, [0.6, 0.4, 0.3, 0.2], rtol=1e-6)


def test_reciprocal_ranks_are_added() -> None:
    rows, scores = fuse_reciprocal(ranking((1, 0.9), (2, 0.7)), ranking((2, 8.0)))
    assert rows.tolist() == [2, 1]
    np.testing.assert_allclose(scores, [1 / 62 + 1 / 61, 1 / 61], rtol=1e-6)


@pytest.mark.parametrize("fusion", list(Fusion))
def test_a_single_ranking_keeps_its_order(fusion: Fusion) -> None:
    only = ranking((5, 0.9), (3, 0.8), (4, 0.1))
    assert fuse(only, NOTHING, fusion)[0].tolist() == [5, 3, 4]
    assert fuse(NOTHING, only, fusion)[0].tolist() == [5, 3, 4]
    assert len(fuse(NOTHING, NOTHING, fusion)[0]) == 0


def test_a_ranking_of_one_hit_or_equal_scores_gets_full_scores() -> None:
    rows, scores = fuse_scores(ranking((1, 0.2)), ranking((2, 8.0), (3, 4.0)), 0.7)
    assert rows.tolist() == [1, 2, 3]
    np.testing.assert_allclose(scores, [0.7, 0.3, 0.15], rtol=1e-6)


def test_equal_scores_are_ordered_by_row() -> None:
    assert fuse_scores(ranking((9, 0.5), (2, 0.5)), NOTHING, 0.5)[0].tolist() == [2, 9]


def test_the_weight_of_a_query_favours_the_side_whose_first_hits_stand_out() -> None:
    flat, steep = np.linspace(0.60, 0.58, 100, dtype=np.float32), np.linspace(0.95, 0.3, 100, dtype=np.float32)
    tied, clear = np.full(100, 9.0, np.float32), np.array([9.0] + [1.0] * 99, np.float32)
    assert query_weight(steep, tied) > query_weight(flat, tied) > query_weight(flat, clear)
    assert query_weight(steep, tied) > query_weight(steep, clear)


def test_dense_scores_above_one_count_for_the_weight() -> None:
    """Corrected vectors of fresh documents do not have unit length."""
    lexical = np.full(2, 9.0, np.float32)
    close, apart = np.array([1.05, 1.049], np.float32), np.array([1.05, 1.02], np.float32)
    assert query_weight(apart, lexical) > query_weight(close, lexical)


def test_a_given_weight_is_used() -> None:
    dense, lexical = ranking((1, 0.9), (2, 0.1)), ranking((2, 9.0), (1, 1.0))
    assert fuse(dense, lexical, Fusion.SCORES, 1.0)[0].tolist() == [1, 2]
    assert fuse(dense, lexical, Fusion.SCORES, 0.0)[0].tolist() == [2, 1]


scores_of = st.lists(st.floats(0.0625, 0.9375, width=32), min_size=1, max_size=120).map(
    lambda s: sorted(s, reverse=True)
)


@given(scores_of, scores_of)
def test_a_weight_is_always_between_0_and_1(dense: list[float], lexical: list[float]) -> None:
    assert 0 < query_weight(np.array(dense, np.float32), np.array(lexical, np.float32)) < 1


def test_a_later_passage_counts_less_than_its_documents_first() -> None:
    owners = np.array([0, 0, 1, 2, 2])
    passages, scores = np.array([4, 2, 1, 0]), np.array([0.95, 0.94, 0.93, 0.5], np.float32)
    documents, rows, best = best_passages(passages, scores, lambda rows: owners[rows], 0.9)
    assert documents.tolist() == [1, 2, 0]
    assert rows.tolist() == [2, 4, 1]
    np.testing.assert_allclose(best, [0.94, 0.855, 0.837], rtol=1e-6)


def test_the_weight_of_later_passages_never_raises_a_score() -> None:
    owners = np.array([0, 0])
    _, rows, best = best_passages(np.array([0, 1]), np.array([-0.6, -0.5], np.float32), lambda rows: owners[rows], 0.9)
    assert (rows.tolist(), best.tolist()) == ([1], [-0.5])


def test_reranking_sorts_scored_hits_and_keeps_the_others_in_place() -> None:
    nan = np.nan
    assert reorder(np.array([0.1, 0.9, nan, 0.5, nan], np.float32)).tolist() == [1, 3, 2, 0, 4]
    assert reorder(np.array([2.0, 2.0, 1.0], np.float32)).tolist() == [0, 1, 2]
    assert reorder(np.array([nan, nan], np.float32)).tolist() == [0, 1]
    assert reorder(np.empty(0, np.float32)).tolist() == []


def test_a_trusted_encoder_gets_a_larger_weight() -> None:
    dense, lexical = np.linspace(0.8, 0.5, 20, dtype=np.float32), np.linspace(9, 2, 20, dtype=np.float32)
    shares = [query_weight(dense, lexical, trust) for trust in (0.0, 0.8, 1.6)]
    assert shares == sorted(shares)
    assert shares[0] == query_weight(dense, lexical)
    rankings = (np.arange(20), dense), (np.arange(40, 60), lexical)
    # A given weight is used whatever the encoder's trust.
    given = fuse(*rankings, Fusion.SCORES, 0.3), fuse(*rankings, Fusion.SCORES, 0.3, 5.0)
    assert np.array_equal(given[0][1], given[1][1])
    assert not np.array_equal(fuse(*rankings, Fusion.SCORES)[1], fuse(*rankings, Fusion.SCORES, None, 5.0)[1])
