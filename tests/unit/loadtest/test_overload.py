"""What an overload's figures say, and when a service counts as recovered."""

from __future__ import annotations

import pytest

from loadtest import overload
from loadtest.open_loop import Flood
from loadtest.overload import Result, as_markdown, recovery_seconds
from loadtest.tables import Quantiles
from tests.unit.loadtest.tiny_server import answer, running


def result(flood: Flood, recovery: float | None = 0.25) -> Result:
    return Result(Quantiles(5.0, 10.0), 100.0, 1000.0, flood, [200.0, 230.0, 220.0], recovery)


def flood(**values: object) -> Flood:
    plain = {
        "unsent": 2,
        "accepted_ms": [20.0, 30.0],
        "batch_ms": [8.0, 12.0, 15.0],
        "refused_ms": [1.0],
        "late_ms": [0.5, 0.5, 1.5],
    }
    return Flood(30.0, **plain | values)  # type: ignore[arg-type]


def test_the_limit_is_twice_the_unloaded_p99_and_a_batch() -> None:
    assert result(flood()).limit_ms == 2 * 10.0 + 12.0


def test_the_table_says_what_was_measured() -> None:
    text = as_markdown({"commit": "abc1234"}, result(flood()))
    for row in (
        "| capacity, 8 connections | 100 answers/s |",
        "| offered | 1000 requests/s for 30.0 s |",
        "| sent (the rest found all connections busy) | 3 (2 unsent) |",
        "| accepted, median / p99 | 25.0 / 30.0 ms |",
        "| limit: twice the unloaded p99 + one batch | 32.0 ms, kept: yes |",
        "| refused with 429 | 1 |",
        "| memory before / highest / after | 200 / 230 / 220 MB |",
        "| recovered after | 0.25 s |",
    ):
        assert row in text
    assert "kept: no" in as_markdown({}, result(flood(accepted_ms=[33.0])))
    assert "| refused, median / p99 | – |" in as_markdown({}, result(flood(refused_ms=[])))
    assert "| recovered after | not within 20 s |" in as_markdown({}, result(flood(), None))


@pytest.mark.parametrize(
    ("faults", "recovery"),
    [({"failures": {"status 503": 1}}, 0.1), ({"without_retry_after": 1}, 0.1), ({"accepted_ms": []}, 0.1), ({}, None)],
)
def test_a_fault_is_the_exit_status(faults: dict[str, object], recovery: float | None) -> None:
    assert result(flood()).is_sound
    assert not result(flood(**faults), recovery).is_sound


def test_recovery_needs_ten_quick_answers_in_a_row() -> None:
    refused = answer(b"{}", "429 Too Many Requests")
    with running(lambda number: [refused if number in (0, 5) else answer()]) as server:
        seconds = recovery_seconds(server.url, ["头痛"], "dense", quick_ms=60_000)
    assert seconds is not None
    assert seconds > 0
    assert len(server.bodies) == 6 + overload.RECOVERED_IN_A_ROW
    assert len({body["query"] for body in server.bodies}) == len(server.bodies)


def test_a_service_that_stays_slow_has_not_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "RECOVERY_SECONDS", 0.1)
    with running(lambda number: [answer()]) as server:
        assert recovery_seconds(server.url, ["头痛"], "dense", quick_ms=0.0) is None
