"""Ratios between ours and theirs, against figures computed by hand."""

from __future__ import annotations

import pytest

from loadtest.harness.generator import Measurement
from loadtest.harness.report import Quantiles, Spread
from loadtest.lab.peers_report import Agreement, agreement, as_markdown, make_report, times


def turn(latency_ms: list[float], seconds: float, processor_seconds: float = 0.5, **failures: int) -> Measurement:
    count = len(latency_ms)
    return Measurement(count, seconds, latency_ms, [100] * count, {}, failures, processor_seconds=processor_seconds)


OURS = [turn([1.0, 3.0], 0.5), turn([2.0], 0.5)]  # 4 and 2 a second, medians 2 and 2
THEIRS = [turn([8.0], 1.0), turn([5.0, 7.0], 2.0, lost=1)]  # 1 and 1 a second, medians 8 and 6
MEASURED = {("ours", 1): OURS, ("theirs", 1): THEIRS, ("ours", 8): OURS, ("theirs", 8): THEIRS}


def test_latency_is_compared_at_one_connection_and_speed_at_several() -> None:
    assert times(OURS, THEIRS, 1) == Spread(3.5, 3.0, 4.0)
    assert times(OURS, THEIRS, 8) == Spread(3.0, 2.0, 4.0)


def test_every_one_of_ours_is_compared_with_every_peer() -> None:
    measured = {**MEASURED, ("ours too", 1): OURS, ("ours too", 8): OURS}
    report = make_report({}, measured, ["ours", "ours too"], [])
    assert [(ratio.own, ratio.peer, ratio.connections) for ratio in report.ratios] == [
        ("ours", "theirs", 1),
        ("ours", "theirs", 8),
        ("ours too", "theirs", 1),
        ("ours too", "theirs", 8),
    ]


def test_a_row_has_all_rounds() -> None:
    row = make_report({}, MEASURED, ["ours"], []).rows[1]
    assert (row.name, row.latency_ms, row.failures) == ("theirs", Quantiles(7.0, 8.0), {"lost": 1})
    assert row.processor_ms == Spread(375.0, 250.0, 500.0)
    assert make_report({}, MEASURED, ["ours"], []).failures == 2  # the same rounds are counted twice


def test_agreement_is_the_first_hit_and_the_share_of_all() -> None:
    reference = [["a", "b"], ["c", "d"]]
    assert agreement("same", reference, reference) == Agreement("same", 1.0, 1.0)
    assert agreement("other", [["b", "a"], ["c", "x"]], reference) == Agreement("other", 0.5, 0.75)


def test_the_markdown_shows_whether_the_goal_is_met() -> None:
    text = as_markdown(make_report({"commit": "abc1234"}, MEASURED, ["ours"], [Agreement("theirs", 0.99, 0.978)]))
    assert text.startswith("- commit: abc1234\n\n")
    assert "| ours | 1 | 3 (2–4) | 2.00 | 3.00 | 375.0 (250.0–500.0) | 0 |" in text
    assert "| ours against theirs | median latency at 1 connection | 3.50 (3.00–4.00) | yes |" in text
    assert "| ours against theirs | requests/s at 8 connections | 3.00 (2.00–4.00) | yes |" in text
    assert "| theirs | 99% | 98% |" in text


@pytest.mark.parametrize(("seconds", "verdict"), [(1.0, "no"), (0.5, "yes")])
def test_the_goal_needs_a_ratio_above_two(seconds: float, verdict: str) -> None:
    measured = {("ours", 8): [turn([1.0, 1.0], seconds)], ("theirs", 8): [turn([1.0], 1.0)]}
    assert f"| {verdict} |" in as_markdown(make_report({}, measured, ["ours"], []))
