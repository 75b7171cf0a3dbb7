"""What is said of kills: whose failures, for how long, and when it is a fault."""

from __future__ import annotations

import pytest

from loadtest.lab import kills
from loadtest.lab.crowd import Event
from loadtest.lab.kills import REDIS_HITS, Kill, Victim, as_markdown, is_sound

CALM = Event(9.0, 0.01, None)
LOST = Event(10.5, 0.5, "connection lost")
REFUSED = Event(12.25, 0.001, "status 503")


def kill(*events: Event, whole: float | None = 2.5, victim: str = "the engine") -> Kill:
    return Kill(victim, list(events), 10.0, whole)


def test_it_is_noticed_until_the_last_failure_ends() -> None:
    assert kill(CALM, LOST, REFUSED, CALM).noticed_seconds == 2.25
    assert kill(CALM).noticed_seconds == 0.0


def test_a_line_holds_all_kills_of_a_victim() -> None:
    found = [kill(CALM, LOST), kill(CALM, CALM, REFUSED, whole=3.5), kill(CALM, victim="Redis", whole=2.125)]
    lines = as_markdown({}, found).splitlines()
    assert lines[-2:] == [
        "| the engine | 2 | 5 | 1 × connection lost, 1 × status 503 | 2.25 s | 3.50 s | 0 | 0 | 10.0 / 10.0 |",
        "| Redis | 1 | 1 | 0 | 0.00 s | 2.12 s | 0 | 0 | 10.0 / 10.0 |",
    ]
    assert len({line.count("|") for line in lines[1:]}) == 1


@pytest.mark.parametrize("event", [Event(11.0, 0.1, None, wrong=True), Event(21.0, 10.0, "hang")])
def test_a_wrong_answer_and_a_hang_are_faults_and_a_failure_is_not(event: Event) -> None:
    assert is_sound([kill(CALM, LOST, REFUSED)])
    assert not is_sound([kill(CALM), kill(CALM, event)])


def test_what_never_comes_back_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "BACK_SECONDS", 0.05)
    dead = Victim("the engine", lambda: None, lambda: False)
    assert kills._wait_whole(dead, kills.time.monotonic()) is None
    assert "| never |" in as_markdown({}, [kill(CALM, whole=None)])
    assert not is_sound([kill(CALM, whole=None)])


def test_hits_of_redis_are_found_among_the_metrics() -> None:
    text = (
        "# TYPE care_cache_total counter\n"
        'care_cache_total{kind="result",layer="redis",outcome="hit"} 12.0\n'
        'care_cache_total{kind="embedding",layer="redis",outcome="hit"} 3.0\n'
        'care_cache_total{kind="result",layer="process",outcome="hit"} 7.0\n'
        'care_cache_total{kind="result",layer="redis",outcome="miss"} 5.0\n'
    )
    assert REDIS_HITS.findall(text) == ["12.0", "3.0"]
