"""The open loop against a small server: what it sends, how it counts answers, and its bounds."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from loadtest.harness import BenchError, generator
from loadtest.harness.generator import Job, Measurement, drive, measure
from tests.unit.loadtest.tiny_server import answer, running

REFUSAL = answer(b"{}", "429 Too Many Requests", "Retry-After: 1")


def offer(url: str, *, per_second: float = 200, seconds: float = 0.1, connections: int = 8) -> Job:
    return Job(url, ["头痛", "fever"], "dense", connections, seconds, first_number=5, per_second=per_second)


def test_everything_that_is_due_is_sent_and_counted() -> None:
    with running(lambda number: [answer()]) as server:
        result = drive(offer(server.url, connections=20))
    assert (result.sent, result.unsent, len(result.latency_ms), result.failures) == (20, 0, 20, {})
    assert {body["query"] for body in server.bodies} == {f"{('头痛', 'fever')[n % 2]} {n}" for n in range(5, 25)}
    assert all(late >= 0 for late in result.late_ms)


def test_refusals_are_counted_separately_and_need_retry_after() -> None:
    silent = answer(b"{}", "429 Too Many Requests")
    kinds = [answer(), REFUSAL, silent, REFUSAL]
    with running(lambda number: [kinds[number % 4]]) as server:
        result = drive(offer(server.url, connections=20))
    assert (len(result.latency_ms), len(result.refused_ms), result.without_retry_after) == (5, 15, 5)
    assert result.failures == {}


def test_other_answers_are_failures() -> None:
    kinds = [answer(b"{}", "503 Service Unavailable"), answer(b"{}")]
    with running(lambda number: [kinds[number % 2]]) as server:
        result = drive(offer(server.url, connections=20))
    assert result.failures == {"status 503": 10, "no results": 10}
    assert result.latency_ms == []


def test_a_request_without_a_free_connection_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "DRAIN_SECONDS", 0.1)
    with running(lambda number: []) as server:
        result = drive(offer(server.url, connections=3))
    assert (result.sent, result.unsent) == (3, 17)
    assert result.failures == {"no answer": 3}


def test_a_broken_connection_is_not_used_again() -> None:
    with running(lambda number: [answer()[:-5], b""]) as server:
        result = drive(offer(server.url, connections=4))
    assert result.failures == {"connection lost": 4}
    assert (result.sent, result.unsent) == (4, 16)


def test_closing_an_idle_connection_is_not_a_failure() -> None:
    with running(lambda number: [answer(), b""]) as server:
        result = drive(offer(server.url, connections=20))
    assert (result.failures, len(result.latency_ms)) == ({}, 20)


def test_the_load_in_its_own_process_measures_the_same() -> None:
    with running(lambda number: [answer() if number % 2 else REFUSAL]) as server:
        result = measure(offer(server.url, connections=20))
    assert isinstance(result, Measurement)
    assert (len(result.latency_ms), len(result.refused_ms), result.failures) == (10, 10, {})


@pytest.mark.parametrize("run", [drive, measure])
def test_a_missing_service_is_reported_in_one_line(run: Callable[[Job], Measurement]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # without listening, so that no other program takes the port
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(BenchError, match=f"{url} is not reachable .* start the service first$"):
            run(offer(url))


@pytest.mark.parametrize(("bound", "value"), [("connections", 513), ("seconds", 61.0), ("per_second", 20_001)])
def test_a_job_is_bounded(bound: str, value: float) -> None:
    with pytest.raises(BenchError, match=f"^{bound} must be above 0 and at most"):
        offer("http://127.0.0.1:1", **{bound: value})


def test_other_addresses_are_refused() -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:PORT only"):
        drive(offer("http://192.0.2.7:80"))
