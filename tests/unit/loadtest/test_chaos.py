"""The report on a fault: number and duration of failures, and whether the service survived it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.lab import chaos
from loadtest.lab.chaos import Trial, as_markdown
from loadtest.lab.crowd import Event
from loadtest.lab.faults import REDIS_HITS, Corpus, Fault, Processes
from loadtest.lab.machinery import Clock, Disk, Proxied

CALM = Event(9.0, 0.01, None)
LOST = Event(10.5, 0.5, "connection lost")
REFUSED = Event(12.25, 0.001, "status 503")


def fault(name: str = "engine killed", may_fail: bool = True) -> Fault:
    return Fault(name, "SIGKILL", lambda: None, lambda: False, may_fail)


def trial(*events: Event, whole: float | None = 2.5, of: Fault | None = None) -> Trial:
    return Trial(of or fault(), list(events), 10.0, whole)


def test_the_failing_time_lasts_until_the_last_failure_ends() -> None:
    assert trial(CALM, LOST, REFUSED, CALM).failing_seconds == 2.25
    assert trial(CALM).failing_seconds == 0.0


def test_a_row_has_all_times_of_a_fault() -> None:
    redis = fault("Redis killed", may_fail=False)
    found = [trial(CALM, LOST), trial(CALM, CALM, REFUSED, whole=3.5), trial(CALM, of=redis, whole=2.125)]
    lines = as_markdown({}, found).splitlines()
    killed = "| engine killed | SIGKILL | 2 | 5 | 1 × connection lost, 1 × status 503 | 2.25 s | 3.50 s | 0 | 0 |"
    assert lines[-2:] == [
        f"{killed} 10.0 / 10.0 |",
        "| Redis killed | SIGKILL | 1 | 1 | 0 | 0.00 s | 2.12 s | 0 | 0 | 10.0 / 10.0 |",
    ]
    assert len({line.count("|") for line in lines[1:]}) == 1


@pytest.mark.parametrize("event", [Event(11.0, 0.1, None, wrong=True), Event(21.0, 10.0, "hang")])
def test_a_wrong_answer_and_a_hang_are_never_survived(event: Event) -> None:
    assert trial(CALM, LOST, REFUSED).is_sound
    assert not trial(CALM, event).is_sound


def test_a_failed_request_is_allowed_only_for_faults_that_may_fail_requests() -> None:
    strict = fault("Redis killed", may_fail=False)
    assert trial(CALM, of=strict).is_sound
    assert not trial(CALM, LOST, of=strict).is_sound


def test_a_service_that_never_recovers_did_not_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "BACK_SECONDS", 0.05)
    assert chaos.wait_whole(fault(), chaos.time.monotonic()) is None
    assert "| never |" in as_markdown({}, [trial(CALM, whole=None)])
    assert not trial(CALM, whole=None).is_sound


def test_fault_names_are_unique_and_only_lost_processes_may_lose_requests() -> None:
    parts = Corpus(Path("nowhere"), {}), Path("nowhere")
    faults = [one for kind in (Processes, Disk, Clock, Proxied) for one in kind(*parts).faults()]
    names = [one.name for one in faults]
    assert len(names) == len(set(names))
    assert [one.name for one in faults if one.may_fail] == ["engine killed", "worker killed"]


def test_words_that_no_fault_has_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos, "stages", lambda folder, documents: [])
    assert chaos.main(["nonsense"]) == 1
    shown = capsys.readouterr()
    assert "no fault was injected" in shown.err
    assert shown.out == ""


def test_hits_of_redis_are_found_among_the_metrics() -> None:
    text = (
        "# TYPE care_cache_total counter\n"
        'care_cache_total{kind="result",layer="redis",outcome="hit"} 12.0\n'
        'care_cache_total{kind="embedding",layer="redis",outcome="hit"} 3.0\n'
        'care_cache_total{kind="result",layer="process",outcome="hit"} 7.0\n'
        'care_cache_total{kind="result",layer="redis",outcome="miss"} 5.0\n'
    )
    assert REDIS_HITS.findall(text) == ["12.0", "3.0"]
