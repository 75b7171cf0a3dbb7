"""What keys cost: services in turn, ratios of neighbours, and the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from loadtest.bench import CACHED, Scenario
from loadtest.harness.generator import Job, Measurement, write_requests
from loadtest.lab import keys
from loadtest.lab.keys import (
    BEFORE,
    MOST_OF_KEYS,
    MOST_SINCE_BEFORE,
    SCENARIOS,
    STARTS,
    WITH,
    WITHOUT,
    Measured,
    Report,
    Service,
    as_markdown,
    make_rows,
    measure_rounds,
)


def measurement(requests: int, processor_seconds: float = 0.1) -> Measurement:
    return Measurement(requests, 1.0, [1.0] * requests, [9] * requests, {}, {}, processor_seconds=processor_seconds)


@pytest.fixture
def services() -> dict[str, Service]:
    started = cast(Any, None)
    return {WITHOUT: Service(started, started), WITH: Service(started, started, "care_key")}


def run(monkeypatch: pytest.MonkeyPatch, services: dict[str, Service], with_keys: Sequence[int]) -> Report:
    """A report of two starts with the same rounds: these numbers of answers with keys beside 1,000 without.

    The first round of a start warms up.
    """
    asked: list[tuple[str, int]] = []
    measured: Measured = {}

    def measure(service: Service, scenario: Scenario, queries: object, seconds: float, number: int) -> Measurement:
        asked.append((service.key, number))
        return measurement(with_keys[number % len(with_keys)] if service.key else 1000)

    monkeypatch.setattr(keys, "_measure", measure)
    for start in range(2):
        measure_rounds(services, ["q"], 1.0, len(with_keys) - 1, start, measured)
    turns = [key for key, number in asked if number == 1][:2], [key for key, number in asked if number == 2][:2]
    assert turns == (["", "care_key"], ["care_key", ""])
    # No query comes twice but in the cache's own scenario.
    assert len({number for _, number in asked}) == 2 * len(with_keys)
    return Report({}, make_rows(measured))


def test_ratios_are_those_of_a_round_without_the_first(
    monkeypatch: pytest.MonkeyPatch, services: dict[str, Service]
) -> None:
    report = run(monkeypatch, services, [1, 980, 990, 970])
    assert [(row.scenario, row.service) for row in report.rows[:2]] == [(SCENARIOS[0], WITHOUT), (SCENARIOS[0], WITH)]
    with_keys = [row for row in report.rows if row.service == WITH]
    assert [(row.ratio.lowest, row.ratio.median, row.ratio.highest) for row in with_keys] == [(0.97, 0.98, 0.99)] * 4
    assert with_keys[0].processor_us.median == pytest.approx(0.1 / 980 * 1e6)
    assert report.misses() == []
    assert f"| {CACHED} | 1 | with keys | 980 (970–990) | 0.980 (0.970–0.990) |" in as_markdown(report)


def test_failures_of_all_rounds_are_counted() -> None:
    failed = Measurement(1, 1.0, [1.0], [9], {}, {"status 503": 2}, processor_seconds=0.1)
    (row,) = make_rows({(WITHOUT, SCENARIOS[0]): [failed, failed]})
    assert row.failures == {"status 503": 4}


def test_more_than_the_limit_is_a_miss(monkeypatch: pytest.MonkeyPatch, services: dict[str, Service]) -> None:
    slow = int(1000 / MOST_OF_KEYS) - 1
    assert len(run(monkeypatch, services, [1, slow, slow, 2000]).misses()) == len(SCENARIOS)
    assert STARTS > 2


def test_more_processor_time_than_before_is_a_miss() -> None:
    def report(growth: float) -> Report:
        pairs = ((WITHOUT, 0.1 * growth), (BEFORE, 0.1))
        return Report({}, make_rows({(name, SCENARIOS[0]): [measurement(100, used)] for name, used in pairs}))

    assert report(MOST_SINCE_BEFORE - 0.001).misses() == []
    assert report(MOST_SINCE_BEFORE + 0.001).misses() == [f"{CACHED}, 1 connections: {BEFORE}"]


def test_the_key_goes_with_every_request() -> None:
    job = Job("http://127.0.0.1:1", ["头痛"], "hybrid", 1, 1.0, key="care_key")
    assert b"\r\nAuthorization: Bearer care_key\r\n" in next(write_requests(job))
    assert b"Authorization" not in next(write_requests(Job("http://127.0.0.1:1", ["头痛"], "hybrid", 1, 1.0)))
