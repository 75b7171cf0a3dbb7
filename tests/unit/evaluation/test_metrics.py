import math

import pytest

from models.evaluation.metrics import average_precision, ndcg, pearson


def test_ndcg_of_a_hand_computed_ranking() -> None:
    grades = {"a": 2, "b": 1, "c": 1}
    gain = 1 / math.log2(2) + 2 / math.log2(4)
    best = 2 / math.log2(2) + 1 / math.log2(3) + 1 / math.log2(4)
    assert ndcg(grades, ["b", "x", "a"]) == pytest.approx(gain / best)


def test_ndcg_is_one_for_the_ideal_order_and_zero_for_none() -> None:
    assert ndcg({"a": 2, "b": 1}, ["a", "b", "x"]) == 1
    assert ndcg({"a": 1}, ["x", "y"]) == 0
    assert ndcg({"a": 0}, ["a"]) == 0


def test_ndcg_looks_no_further_than_k() -> None:
    assert ndcg({"a": 1}, [*"0123456789", "a"]) == 0
    assert ndcg({str(i): 1 for i in range(20)}, [str(i) for i in range(10)]) == pytest.approx(1)


def test_average_precision_by_hand() -> None:
    assert average_precision([True, False, True, False]) == pytest.approx((1 + 2 / 3) / 2)
    assert average_precision([False, False]) == 0
    assert average_precision([False] * 10 + [True]) == 0


def test_pearson_by_hand() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
