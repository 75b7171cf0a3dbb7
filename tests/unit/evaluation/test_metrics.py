"""Metrics of the library against values computed by hand."""

import math
import warnings

import numpy as np
import pytest

from models.evaluation.judge import correlations, ranked
from models.evaluation.sets import METRICS, Kind

DISCOUNT = [1 / math.log2(rank + 1) for rank in range(1, 101)]


def one(grades: dict[int, int], ranking: list[int], name: str, relevant: int = 1) -> float:
    """Returns one metric of one ranking."""
    return float(ranked([grades], [np.array(ranking, dtype=np.int64)], [name], relevant)[name][0])


def test_every_metric_equals_the_value_computed_by_hand() -> None:
    # Documents 3 (grade 2) and 5 and 8 (grade 1); found: 5 first, 3 third, 8 not at all.
    found = ranked([{3: 2, 5: 1, 8: 1, 9: 0}], [np.array([5, 9, 3, 7])], METRICS[Kind.RETRIEVAL])
    ideal = 2 * DISCOUNT[0] + DISCOUNT[1] + DISCOUNT[2]
    assert {name: values[0] for name, values in found.items()} == pytest.approx(
        {
            "nDCG@10": (DISCOUNT[0] + 2 * DISCOUNT[2]) / ideal,
            "nDCG@20": (DISCOUNT[0] + 2 * DISCOUNT[2]) / ideal,
            "Recall@5": 2 / 3,
            "Recall@20": 2 / 3,
            "Recall@100": 2 / 3,
            "MRR@10": 1.0,
            "Acc@1": 1.0,
            "Acc@5": 1.0,
            "Acc@10": 1.0,
        }
    )


def test_the_gain_of_a_grade_is_the_grade() -> None:
    assert one({1: 3, 2: 1}, [2, 1], "nDCG@10") == pytest.approx((1 + 3 * DISCOUNT[1]) / (3 + DISCOUNT[1]))


def test_documents_of_grade_zero_or_below_count_for_nothing() -> None:
    grades = {1: 1, 2: 0, 3: -1}
    assert one(grades, [2, 3, 1], "nDCG@10") == pytest.approx(DISCOUNT[2])
    assert one(grades, [2, 3, 1], "MRR@10") == pytest.approx(1 / 3)
    assert one(grades, [2, 3], "Recall@100") == 0


def test_hits_beyond_the_depth_do_not_count() -> None:
    ranking = [*range(10, 20), 1]
    for name in ("nDCG@10", "MRR@10", "Acc@10", "MAP@10"):
        assert one({1: 1}, ranking, name) == 0, name
    assert one({1: 1}, ranking, "Recall@100") == 1
    assert one({1: 1}, [0, 1], "Acc@1") == 0
    assert one({1: 1}, [0, 0, 0, 0, 1], "Acc@5") == 1


def test_recall_is_over_all_relevant_documents() -> None:
    many = dict.fromkeys(range(200), 1)
    assert one(many, list(range(100)), "Recall@100") == pytest.approx(0.5)
    assert one({0: 1}, list(range(5)), "Recall@100") == 1
    assert one({0: 1, 1: 1, 2: 1, 3: 1}, [3, 9], "Recall@1") == pytest.approx(0.25)


def test_average_precision_divides_by_all_relevant_documents() -> None:
    assert one({0: 2, 1: 2}, [0, 7, 1], "MAP@10") == pytest.approx((1 + 2 / 3) / 2)
    assert one({0: 2, 1: 2}, [0], "MAP@10") == pytest.approx(1 / 2)
    twelve = dict.fromkeys(range(12), 2)
    assert one(twelve, list(range(10)), "MAP@10") == pytest.approx(10 / 12)
    assert one(twelve, list(range(12)), "MAP") == pytest.approx(1)
    assert one(twelve, [11, 10], "MAP@10") == pytest.approx(2 / 12)


def test_average_precision_is_computed_as_in_mteb() -> None:
    from models.evaluation.mteb_model import RelevanceEvaluator

    generator = np.random.default_rng(3)
    for _ in range(20):
        ranking = generator.permutation(40)[:30]
        grades = {int(row): 1 for row in generator.permutation(40)[: generator.integers(1, 25)]}
        qrels = {"q": {str(row): grade for row, grade in grades.items()}}
        scores = {"q": {str(row): 100.0 - place for place, row in enumerate(ranking)}}
        theirs = RelevanceEvaluator(qrels, {"map_cut.10"}).evaluate(scores)["q"]["map_cut_10"]
        assert one(grades, ranking.tolist(), "MAP@10") == pytest.approx(theirs)


def test_a_metric_without_a_depth_is_over_the_whole_ranking() -> None:
    ranking = [*range(10, 20), 1]
    assert one({1: 1}, ranking, "MAP") == pytest.approx(1 / 11)
    assert one({1: 1}, ranking, "nDCG") == pytest.approx(DISCOUNT[10])


def test_the_lowest_relevant_grade_can_be_set() -> None:
    grades = {0: 1, 1: 2}
    assert one(grades, [0, 1], "MAP@10", relevant=2) == pytest.approx(1 / 2)
    assert one(grades, [0, 1], "MRR@10", relevant=2) == pytest.approx(1 / 2)
    assert one({0: 1}, [0], "MAP@10", relevant=2) == 0
    ideal = 2 + DISCOUNT[1]
    assert one(grades, [0, 1], "nDCG", relevant=2) == pytest.approx((1 + 2 * DISCOUNT[1]) / ideal), "all grades gain"


def test_an_empty_ranking_scores_zero_and_does_not_affect_others() -> None:
    found = ranked([{0: 1}, {4: 1}], [np.array([], dtype=np.int64), np.array([4])], METRICS[Kind.RETRIEVAL])
    assert all(values.tolist() == [0, 1] for values in found.values())
    assert one({0: 1}, [], "MAP@10") == 0


def test_row_zero_is_a_document_like_any_other() -> None:
    found = ranked([{0: 1}, {7: 1, 8: 1}], [np.array([5, 0]), np.array([0, 7])], ["MRR@5", "Recall@5"])
    assert found["MRR@5"].tolist() == [0.5, 0.5]
    assert found["Recall@5"].tolist() == [1, 0.5]


def test_metrics_equal_those_of_the_library() -> None:
    """Random rankings, through our arrays and as users of the library give them."""
    import ranx

    generator = np.random.default_rng(7)
    rankings = [generator.permutation(60)[:40] for _ in range(30)]
    grades = [{int(row): int(generator.integers(0, 3)) for row in generator.permutation(60)[:8]} for _ in rankings]
    run = {str(n): {str(row): 100.0 - place for place, row in enumerate(rows)} for n, rows in enumerate(rankings)}
    qrels = {str(n): {str(row): grade for row, grade in of_query.items()} for n, of_query in enumerate(grades)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = ranx.evaluate(qrels, run, ["ndcg@10", "mrr@10"], return_mean=False)
    ours = ranked(grades, rankings, ["nDCG@10", "MRR@10"])
    assert ours["nDCG@10"].tolist() == pytest.approx(theirs["ndcg@10"].tolist())
    assert ours["MRR@10"].tolist() == pytest.approx(theirs["mrr@10"].tolist())


def test_correlations_equal_the_values_computed_by_hand() -> None:
    assert correlations([1, 2, 3], [2, 4, 6]) == pytest.approx({"Pearson": 1, "Spearman": 1})
    assert correlations([1, 2, 3], [3, 1, 2]) == pytest.approx({"Pearson": -0.5, "Spearman": -0.5})
    # Ranks ignore distances: the last value is far off, but the order is right.
    assert correlations([1, 2, 3, 4], [1, 2, 3, 100])["Spearman"] == pytest.approx(1)
    assert correlations([1, 2, 3, 4], [1, 2, 3, 100])["Pearson"] < 0.9


def test_equal_similarities_have_no_correlation() -> None:
    assert correlations([0.5, 0.5, 0.5], [1, 2, 3]) == {"Pearson": 0, "Spearman": 0}


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="no metric is called 'F1@3'"):
        one({0: 1}, [0], "F1@3")
