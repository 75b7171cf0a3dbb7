"""What the swaps make of answers: counted by snapshot, mixed or failed."""

from __future__ import annotations

from typing import Any

from loadtest.lab.crowd import Event
from loadtest.lab.swaps import is_mixed, summarize

PREFIXES = {"v1": "a-", "v2": "b-"}


def body(version: str, *ids: str) -> dict[str, Any]:
    return {"snapshot": version, "results": [{"hits": [{"id": name} for name in ids]}]}


def answered(version: str, *ids: str) -> Event:
    return Event(1.0, 0.1, None, is_mixed(PREFIXES, body(version, *ids)), version)


def test_answers_are_counted_by_snapshot() -> None:
    text, sound = summarize([answered("v1", "a-1", "a-2"), answered("v2", "b-1")], 20, 8)
    counts = "1 + 1 answers of the two snapshots, 0 failed requests, 0 mixed answers"
    assert (text, sound) == (f"20 swaps, 8 connections: {counts}", True)
    assert not summarize([answered("v1", "a-1")], 20, 8)[1]


def test_a_hit_of_the_other_snapshot_or_no_hit_at_all_is_mixed() -> None:
    text, sound = summarize([answered("v1", "a-1", "b-2"), answered("v1"), answered("v2", "b-1")], 20, 8)
    assert "2 mixed answers" in text
    assert not sound


def test_a_status_other_than_200_is_a_failure() -> None:
    text, sound = summarize([Event(1.0, 0.1, "status 503"), answered("v1", "a-1"), answered("v2", "b-1")], 20, 8)
    assert "1 + 1 answers of the two snapshots, 1 failed requests" in text
    assert not sound
