"""The cost model: what it learns from batches, and how little one outlier changes it."""

from __future__ import annotations

import pytest

from service.engine.batches import LEAST_SEEN, CostModel


def trained(batches: list[tuple[int, float]]) -> CostModel:
    model = CostModel()
    for queries, seconds in batches:
        model.observe(queries, seconds)
    return model


def test_there_is_no_estimate_before_enough_batches() -> None:
    model = trained([(1, 5.0)] * (LEAST_SEEN - 1))
    assert model.seconds(1000, 32) == 0.0
    assert model.queries(1.0) == 0
    model.observe(1, 5.0)
    assert model.seconds(1000, 32) == pytest.approx(5000)


def test_on_a_cpu_the_cost_is_per_query() -> None:
    model = trained([(size, 0.003 * size) for size in (1, 8, 3, 32, 2, 16) * 10])
    assert model.per_query == pytest.approx(0.003)
    assert model.fixed == pytest.approx(0, abs=1e-6)
    assert model.seconds(64, 32) == pytest.approx(0.192)
    assert model.queries(0.0301) == 10


def test_on_a_gpu_the_cost_is_per_batch() -> None:
    model = trained([(size, 0.0026 + 0.000015 * size) for size in (1, 256, 30, 64, 2, 128) * 10])
    assert model.fixed == pytest.approx(0.0026, rel=0.1)
    assert model.seconds(512, 256) == pytest.approx(2 * 0.0026 + 512 * 0.000015, rel=0.1)


def test_with_similar_batch_sizes_the_cost_per_query_is_near_the_average() -> None:
    model = trained([(size, seconds) for size, seconds in ((7, 0.017), (8, 0.014), (8, 0.013), (9, 0.013)) * 10])
    assert model.per_query > 0.0012  # near the average; the slope would be below zero


def test_with_one_batch_size_the_cost_is_per_query() -> None:
    model = trained([(4, 0.02)] * 30)
    assert (model.per_query, model.fixed) == (pytest.approx(0.005), pytest.approx(0))


def test_if_larger_batches_take_no_longer_the_cost_per_query_is_zero() -> None:
    model = trained([(size, 0.01 - 0.0004 * size) for size in (1, 20, 5, 10) * 10])
    assert model.per_query == 0.0
    assert model.seconds(40, 20) == pytest.approx(2 * model.fixed)
    assert model.queries(1.0) == 0


def test_one_stalled_batch_changes_little() -> None:
    model = trained([(1, 0.003)] * 50)
    model.observe(1, 20.0)
    assert model.seconds(1, 32) < 0.005


def test_a_lasting_change_is_learned() -> None:
    model = trained([(1, 0.003)] * 50 + [(1, 0.009)] * 50)
    assert model.seconds(1, 32) == pytest.approx(0.009, rel=0.02)


def test_after_enough_batches_the_estimate_uses_the_slope() -> None:
    assert trained([(1, 0.004)] * (LEAST_SEEN - 1)).queries(1.0) == 0
    assert trained([(1, 0.0041), (2, 0.0042)] * 20).queries(1.0) > 900
    assert trained([(1, 0.0)] * LEAST_SEEN).queries(1.0) == 0
