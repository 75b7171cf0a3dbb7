"""The cost of API keys: ways measured in turn, ratios of neighbours, an interval over starts, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest

from loadtest.bench import CACHED
from loadtest.harness.generator import Job, write_requests
from loadtest.lab.keys import (
    BEFORE,
    MODES,
    MOST_OF_KEYS,
    MOST_SINCE_BEFORE,
    TRACED,
    WITH,
    WITHOUT,
    Report,
    Row,
    Turn,
    Way,
    as_markdown,
    interval,
    measure,
)


@dataclass(frozen=True)
class Scripted(Way):
    """A way whose rounds take the given CPU times."""

    times_us: Sequence[float] = ()
    spans_us: float = 0.0
    asked: list[tuple[str, str, int]] = field(default_factory=list)

    def turn(self, mode: str, queries: Sequence[str], requests: int, first: int = 0) -> Turn:
        self.asked.append((self.url, mode, first))
        time_us = self.times_us[first // requests]
        return Turn(1e6 / time_us, time_us)

    def other_threads_us(self, queries: Sequence[str]) -> float:
        return self.spans_us


def test_ways_take_turns_and_the_time_of_the_span_thread_is_added_to_traced_hits() -> None:
    asked: list[tuple[str, str, int]] = []
    without = Scripted(WITHOUT, 0, times_us=[9999, 100, 200, 300], spans_us=1.5, asked=asked)
    traced = Scripted(TRACED, 0, times_us=[1, 103, 206, 309], spans_us=4.5, asked=asked)
    turns = measure({WITHOUT: without, TRACED: traced}, ["q"], 3)
    hits = [(name, first // MODES[CACHED]) for name, mode, first in asked if mode == CACHED]
    forward, backward = [WITHOUT, TRACED], [TRACED, WITHOUT]
    assert [name for name, _ in hits] == [*backward, *forward, *backward, *forward]
    assert [number for _, number in hits] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [turn.processor_us for turn in turns[TRACED, CACHED]] == [106, 209, 312], "the first round is left out"
    assert [turn.processor_us for turn in turns[TRACED, "lexical"]] == [103, 206, 309]
    row = Row.of(TRACED, "lexical", [turns])
    assert (row.processor_ratio.median, row.ratio.median) == (pytest.approx(1.03), pytest.approx(1 / 1.03))
    assert row.processor_us.median == 206
    assert "| lexical | with keys and traces | 4854 (4854–4854) | 0.971 (0.971–0.971) | 206" in as_markdown(
        Report({}, [row])
    )


@pytest.mark.parametrize(("starts", "cut"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (30, 9)])
def test_the_interval_leaves_out_as_many_starts_as_95_percent_allow(starts: int, cut: int) -> None:
    """As in tables of the confidence interval of a median."""
    values = [float(value) for value in range(starts)]
    found = interval(values[::-1])
    assert (found.median, found.lowest, found.highest) == (median(values), cut, starts - 1 - cut)


@pytest.mark.parametrize(
    ("way", "ratio", "is_missed"),
    [
        (WITH, MOST_OF_KEYS - 0.001, False),
        (WITH, MOST_OF_KEYS + 0.001, True),
        (TRACED, MOST_OF_KEYS + 0.001, True),
        (BEFORE, 1 / (MOST_SINCE_BEFORE - 0.001), False),
        (BEFORE, 1 / (MOST_SINCE_BEFORE + 0.001), True),
    ],
)
def test_a_ratio_above_its_limit_is_missed(way: str, ratio: float, is_missed: bool) -> None:
    turns = {(WITHOUT, CACHED): [Turn(9.0, 100.0)], (way, CACHED): [Turn(9.0, 100.0 * ratio)]}
    assert Row.of(way, CACHED, [turns]).is_missed is is_missed


def test_the_key_is_sent_with_every_request() -> None:
    job = Job("http://127.0.0.1:1", ["头痛"], "hybrid", 1, 1.0, key="care_key")
    assert b"\r\nAuthorization: Bearer care_key\r\n" in next(write_requests(job))
    assert b"Authorization" not in next(write_requests(Job("http://127.0.0.1:1", ["头痛"], "hybrid", 1, 1.0)))
