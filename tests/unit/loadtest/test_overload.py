"""The figures of an overload test, and when a service counts as recovered."""

from __future__ import annotations

import pytest

from loadtest.harness.generator import Measurement
from loadtest.harness.report import Quantiles
from loadtest.lab import overload
from loadtest.lab.overload import Load, Result, as_markdown, recovery_seconds
from tests.unit.loadtest.tiny_server import answer, running


def result(flood: Measurement, recovery: float | None = 0.25, *, proxied: bool = True) -> Result:
    loads = [Load(2, 200.0, flood, recovery), Load(10, 1000.0, flood, recovery)]
    return Result(Quantiles(5.0, 10.0), 100.0, loads, [200.0, 230.0, 220.0], proxied)


def flood(**values: object) -> Measurement:
    """Makes a measurement with 80 answers a second."""
    plain = {"unsent": 2, "latency_ms": [20.0, 30.0] * 40, "refused_ms": [1.0], "late_ms": [0.5, 0.5, 1.5]}
    fixed = {"sent": 3, "elapsed_seconds": 1.0, "body_bytes": [], "timings_ms": {}, "failures": {}}
    return Measurement(**fixed | plain | values)  # type: ignore[arg-type]


def test_the_table_shows_what_was_measured() -> None:
    text = as_markdown({"commit": "abc1234"}, result(flood()))
    assert "Capacity, 8 connections: 100 answers/s." in text
    assert "Memory before / highest / after: 200 / 230 / 220 MB." in text
    assert "Limits missed: none." in text
    for row in (
        "| requests/s offered | 200 (2 found no free connection) | 1000 (2 found no free connection) |",
        "| answered | 80/s, 80% of the capacity | 80/s, 80% of the capacity |",
        "| answered, median / p99 | 25.0 / 30.0 ms | 25.0 / 30.0 ms |",
        "| refused with 429 | 1 | 1 |",
        "| recovered after | 0.25 s | 0.25 s |",
    ):
        assert row in text
    assert "| refused, median / p99 | – | – |" in as_markdown({}, result(flood(refused_ms=[])))
    assert "| recovered after | not within 20 s | not within 20 s |" in as_markdown({}, result(flood(), None))


@pytest.mark.parametrize(
    ("faults", "missed"),
    [
        ({"failures": {"status 503": 1}}, "only searches and refusals"),
        ({"without_retry_after": 1}, "only searches and refusals"),
        ({"latency_ms": [20.0] * 79}, "answered at least 80% of the capacity"),
        ({"latency_ms": [110.1] * 80}, "p99 of the answered"),
        ({"refused_ms": [20.0]}, "median refusal"),
    ],
)
def test_a_limit_that_is_missed_is_named(faults: dict[str, object], missed: str) -> None:
    assert result(flood()).misses() == []
    assert result(flood(**faults)).misses() == [f"2 x: {missed}", f"10 x: {missed}"]


def test_without_a_proxy_the_limits_for_answers_and_refusals_are_looser() -> None:
    assert result(flood(latency_ms=[1010.0] * 60, refused_ms=[50.0]), proxied=False).misses() == []
    assert result(flood(latency_ms=[1010.1] * 60), proxied=False).misses() == ["2 x: p99 of the answered"]
    assert result(flood(latency_ms=[20.0] * 59), proxied=False).misses() == [
        "2 x: answered at least 60% of the capacity"
    ]
    assert result(flood(latency_ms=[2010.1] * 19), proxied=False).misses()[2:] == [
        "10 x: answered at least 20% of the capacity",
        "10 x: p99 of the answered",
    ]


def test_a_service_that_does_not_recover_misses_a_limit() -> None:
    assert result(flood(), recovery=None).misses() == ["2 x: recovered", "10 x: recovered"]


def test_recovery_needs_ten_quick_answers_in_a_row() -> None:
    refused = answer(b"{}", "429 Too Many Requests")
    with running(lambda number: [refused if number in (0, 5) else answer()]) as server:
        seconds = recovery_seconds(server.url, ["头痛"], quick_ms=60_000)
    assert seconds is not None
    assert seconds > 0
    assert len(server.bodies) == 6 + overload.RECOVERED_IN_A_ROW
    assert len({body["query"] for body in server.bodies}) == len(server.bodies)


def test_a_service_that_stays_slow_has_not_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "RECOVERY_SECONDS", 0.1)
    with running(lambda number: [answer()]) as server:
        assert recovery_seconds(server.url, ["头痛"], quick_ms=0.0) is None
