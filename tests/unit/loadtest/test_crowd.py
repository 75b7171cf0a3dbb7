"""Concurrent clients of a service that answers, refuses, breaks, hangs or gives wrong answers."""

from __future__ import annotations

import json

import pytest

from loadtest.harness import BenchError
from loadtest.lab import crowd
from loadtest.lab.crowd import Event, checking_crowd, is_wrong, learn_rankings
from tests.support.waiting import wait_until
from tests.unit.loadtest.tiny_server import Respond, answer, running

KNOWN = ["a", "b", "c", "d"]


def hits(*ids: str) -> bytes:
    return answer(json.dumps({"results": [{"hits": [{"id": name} for name in ids]}]}).encode())


def run_crowd(respond: Respond, *, connections: int = 1, requests: int = 5) -> list[Event]:
    """Returns the events of the first requests of the clients."""
    with (
        running(respond) as server,
        checking_crowd(server.url, connections, {"头痛": KNOWN}).asking(cache=False) as events,
    ):
        wait_until(lambda: len(events) >= requests)
    return events[:requests]


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [(KNOWN, False), (["d", "a"], False), (["a", "x", "y"], True), ([], True), (["b", "c", "x"], False)],
)
def test_an_answer_that_shares_less_than_half_of_the_known_hits_is_wrong(ids: list[str], wrong: bool) -> None:
    assert is_wrong(ids, KNOWN) is wrong


def test_right_answers_are_neither_failures_nor_wrong() -> None:
    events = run_crowd(lambda number: [hits(*KNOWN)], connections=3)
    assert len(events) == 5
    assert {(event.failure, event.wrong) for event in events} == {(None, False)}
    assert all(event.seconds > 0 for event in events)


def test_the_answer_to_another_query_and_a_broken_body_are_wrong() -> None:
    kinds = [hits("x", "y"), answer(b"{}"), answer(b"no json")]
    events = run_crowd(lambda number: [kinds[number % 3]])
    assert {(event.failure, event.wrong) for event in events} == {(None, True)}


def test_a_refusal_and_a_broken_connection_are_failures_and_the_clients_go_on() -> None:
    def respond(number: int) -> list[bytes]:
        kinds: list[list[bytes]] = [[answer(b"{}", "503 Service Unavailable")], [b""], [hits(*KNOWN)]]
        return kinds[number % 3]

    events = run_crowd(respond, requests=6)
    assert [event.failure for event in events] == ["status 503", "connection lost", None] * 2
    assert not any(event.wrong for event in events)


def test_a_missing_answer_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "HANG_SECONDS", 0.1)
    events = run_crowd(lambda number: [], requests=1)
    assert [event.failure for event in events] == ["hang"]


def test_connections_are_reopened_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "RENEWED", 2)
    with running(lambda number: [hits(*KNOWN)]) as server:
        with checking_crowd(server.url, 1, {"头痛": KNOWN}).asking(cache=True) as events:
            wait_until(lambda: len(events) >= 6)
        assert server.connections >= 3
        assert {body["cache"] for body in server.bodies} == {True}


def test_rankings_are_learned_before_the_faults() -> None:
    with running(lambda number: [hits("a", "b") if number == 0 else hits()]) as server:
        assert learn_rankings(server.url, ["头痛", "无"]) == {"头痛": ["a", "b"]}
    with (
        running(lambda number: [answer(b"{}", "429 Too Many Requests")]) as server,
        pytest.raises(BenchError, match="answered 429 before any fault"),
    ):
        learn_rankings(server.url, ["头痛"])
