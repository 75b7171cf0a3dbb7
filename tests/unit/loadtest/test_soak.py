"""Pass criteria of a soak test: slope of memory in the second half, difference of open files, no failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.lab.soak import Minute, as_markdown, growth_per_hour, misses

CALM = Minute(1200, {}, 0, 20.0, 200.0, 90)


def minutes(*memory_mb: float) -> list[Minute]:
    return [replace(CALM, memory_mb=one) for one in memory_mb]


def test_the_first_half_may_grow() -> None:
    found = minutes(100, 150, 190, 200, 200, 200)
    assert growth_per_hour(found) == 0.0
    assert misses(found) == []
    assert "Limits missed: none." in as_markdown({}, found)


def test_growth_in_the_second_half_fails_the_test() -> None:
    found = minutes(200, 200, 200, 200, 201, 202)
    assert growth_per_hour(found) == pytest.approx(0.3)
    assert misses(found) == ["memory grows by 30.0% an hour"]


def test_growing_open_files_and_failures_fail_the_test() -> None:
    found = minutes(200, 200, 200, 200)
    found[-1] = replace(found[-1], files=120)
    found[0] = replace(found[0], failures={"status 503": 2})
    assert misses(found) == ["30 more open files", "2 failed requests"]
