"""The cost model: what it learns from batches, and what it does not let itself be told by one bad one."""

from __future__ import annotations

import pytest

from service.engine.queue import LEAST_SEEN, CostModel


def taught(batches: list[tuple[int, float]]) -> CostModel:
    model = CostModel()
    for queries, seconds in batches:
        model.observe(queries, seconds)
    return model


def test_nothing_is_foretold_before_enough_was_seen() -> None:
    model = taught([(1, 5.0)] * (LEAST_SEEN - 1))
    assert model.seconds(1000, 32) == 0.0
    assert model.queries(1.0) == 0
    model.observe(1, 5.0)
    assert model.seconds(1000, 32) == pytest.approx(5000)


def test_a_processor_pays_per_query() -> None:
    model = taught([(size, 0.003 * size) for size in (1, 8, 3, 32, 2, 16) * 10])
    assert model.per_query == pytest.approx(0.003)
    assert model.fixed == pytest.approx(0, abs=1e-6)
    assert model.seconds(64, 32) == pytest.approx(0.192)
    assert model.queries(0.0301) == 10


def test_a_card_pays_per_batch() -> None:
    model = taught([(size, 0.0026 + 0.000015 * size) for size in (1, 256, 30, 64, 2, 128) * 10])
    assert model.fixed == pytest.approx(0.0026, rel=0.1)
    assert model.seconds(512, 256) == pytest.approx(2 * 0.0026 + 512 * 0.000015, rel=0.1)


def test_sizes_that_hardly_differ_say_little_of_the_price_of_a_query() -> None:
    model = taught([(size, seconds) for size, seconds in ((7, 0.017), (8, 0.014), (8, 0.013), (9, 0.013)) * 10])
    assert model.per_query > 0.0012  # near the average; the slope would be below zero


def test_batches_of_one_size_count_as_paid_per_query() -> None:
    model = taught([(4, 0.02)] * 30)
    assert (model.per_query, model.fixed) == (pytest.approx(0.005), pytest.approx(0))


def test_batches_that_take_no_longer_for_more_queries_have_no_price_per_query() -> None:
    model = taught([(size, 0.01 - 0.0004 * size) for size in (1, 20, 5, 10) * 10])
    assert model.per_query == 0.0
    assert model.seconds(40, 20) == pytest.approx(2 * model.fixed)
    assert model.queries(1.0) == 0


def test_one_batch_during_which_the_machine_stood_still_changes_little() -> None:
    model = taught([(1, 0.003)] * 50)
    model.observe(1, 20.0)
    assert model.seconds(1, 32) < 0.005


def test_a_change_that_lasts_is_learned() -> None:
    model = taught([(1, 0.003)] * 50 + [(1, 0.009)] * 50)
    assert model.seconds(1, 32) == pytest.approx(0.009, rel=0.02)


def test_queries_of_a_batch_are_estimated_by_the_slope_once_enough_was_seen() -> None:
    assert taught([(1, 0.004)] * (LEAST_SEEN - 1)).queries(1.0) == 0
    assert taught([(1, 0.0041), (2, 0.0042)] * 20).queries(1.0) > 900
    assert taught([(1, 0.0)] * LEAST_SEEN).queries(1.0) == 0
