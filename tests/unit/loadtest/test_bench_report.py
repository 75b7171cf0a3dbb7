"""The arithmetic of the benchmark, against figures computed by hand."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from loadtest.bench import BARE, CACHED, Scenario, as_markdown, make_report
from loadtest.harness.generator import STAGES, Measurement
from loadtest.harness.report import Quantiles, Spread, percentile


def measurement(
    latency_ms: list[float], seconds: float, timings: list[dict[str, float]] | None = None, **failures: int
) -> Measurement:
    by_stage = {} if timings is None else {stage: [one[stage] for one in timings] for stage in STAGES}
    return Measurement(len(latency_ms), seconds, latency_ms, [100] * len(latency_ms), by_stage, failures)


def stages(tokenize: float, queue: float, encode: float, search: float, fetch: float, total: float) -> dict[str, float]:
    return dict(zip(STAGES, (tokenize, queue, encode, search, 0.0, fetch, total), strict=True))


FIRST = stages(0.1, 0.2, 2.0, 0.5, 0.1, 3.0)  # total − work = 0.4
SECOND = stages(0.1, 0.2, 1.0, 0.5, 0.1, 2.1)  # 0.5
THIRD = stages(0.1, 0.3, 4.0, 1.0, 0.2, 5.8)  # 0.6
MEASURED = {
    Scenario("hybrid", 1): [
        measurement([3.5, 2.3], 0.5, [FIRST, SECOND]),  # beyond the work: 0.9, 0.7; 4 requests/s
        measurement([6.0], 0.5, [THIRD], lost=2),  # 0.8; 2 requests/s
        measurement([3.7], 0.125, [FIRST], lost=1),  # 1.1; 8 requests/s
    ],
    Scenario(BARE, 1): [
        measurement([0.1, 0.3, 0.2, 0.2], 0.25),  # 16
        measurement([0.2, 0.4], 0.5),  # 4
        measurement([0.2] * 10, 0.3125),  # 32
    ],
}


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 102)), 0.99, 100),
        ([3, 1, 2], 0.99, 3),
        ([4, 1, 3, 2], 0.5, 2),
        ([7], 0.99, 7),
        ([2, 1], 0.0, 1),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


def test_speed_is_the_median_of_rounds_and_ratios_are_taken_within_a_round() -> None:
    hybrid, bare = make_report({}, MEASURED).rows
    assert hybrid.requests_per_second == Spread(4, 2, 8)
    assert bare.requests_per_second == Spread(16, 4, 32)
    assert hybrid.ratio_to_bare == Spread(0.25, 0.25, 0.5)
    assert bare.ratio_to_bare is None


def test_latencies_and_stages_are_over_all_requests() -> None:
    hybrid, bare = make_report({}, MEASURED).rows
    assert hybrid.requests == 4
    assert hybrid.latency_ms == Quantiles(3.6, 6.0)
    assert hybrid.stages_ms["encode"] == Quantiles(2.0, 4.0)
    assert hybrid.stages_ms["total"] == Quantiles(3.0, 5.8)
    assert bare.latency_ms == Quantiles(0.2, 0.4)
    assert bare.stages_ms == {}


def test_overhead_is_per_request_and_then_the_median() -> None:
    (overhead,) = make_report({}, MEASURED).overheads
    assert overhead.mode == "hybrid"
    assert overhead.client_ms == pytest.approx((0.8 + 0.9) / 2)  # of 0.7, 0.8, 0.9, 1.1
    assert overhead.bare_ms == pytest.approx(0.2)
    assert overhead.beyond_bare_ms == pytest.approx(0.65)
    assert overhead.server_ms == pytest.approx((0.4 + 0.5) / 2)  # of 0.4, 0.4, 0.5, 0.6


def test_overhead_is_of_one_connection_only() -> None:
    crowd = {Scenario("hybrid", 8): MEASURED[Scenario("hybrid", 1)], Scenario(BARE, 8): MEASURED[Scenario(BARE, 1)]}
    report = make_report({}, MEASURED | crowd)
    assert len(report.rows) == 4
    assert len(report.overheads) == 1


def test_failures_are_added_up() -> None:
    report = make_report({}, MEASURED)
    assert report.rows[0].failures == {"lost": 3}
    assert report.failures == 3


def test_the_markdown_has_the_facts_and_three_tables() -> None:
    text = as_markdown(make_report({"commit": "abc1234"}, MEASURED))
    assert text.splitlines()[:2] == ["- commit: abc1234", ""]
    assert "| hybrid | 1 | 4 (2–8) | 0.250 (0.250–0.500) | 3.60 | 6.00 | 3 × lost |" in text
    assert "| bare framework | 1 | 16 (4–32) | – | 0.20 | 0.40 | 0 |" in text
    hybrid = "0.10 / 0.10 | 0.20 / 0.30 | 2.00 / 4.00 | 0.50 / 1.00 | 0.00 / 0.00 | 0.10 / 0.20 | 3.00 / 5.80"
    assert f"| hybrid | 1 | {hybrid} |" in text
    assert "| hybrid | 0.850 | yes | 0.200 | 0.650 | 0.450 |" in text
    tables = [block.splitlines() for block in text.split("\n\n")[1:]]
    assert [len({line.count("|") for line in table}) for table in tables] == [1, 1, 1]


def test_an_overhead_of_a_millisecond_misses_the_limit() -> None:
    slow = MEASURED | {Scenario("hybrid", 1): [measurement([3.6], 1, [FIRST])] * 3}
    assert "| hybrid | 1.000 | no |" in as_markdown(make_report({}, slow))


@pytest.mark.parametrize(("total", "verdict"), [(0.125, "yes"), (0.75, "no")])
def test_cache_hits_have_their_own_table_and_no_overhead(total: float, verdict: str) -> None:
    hit = stages(0.0, 0.0, 0.0, 0.0, 0.0, total)
    cached = {Scenario(CACHED, 1): [measurement([1.0], 1.0, [hit])] * 3}
    report = make_report({}, MEASURED | cached)
    assert [overhead.mode for overhead in report.overheads] == ["hybrid"]
    assert f"| process LRU | 1 | {total:.3f} / {total:.3f} | {verdict} | 1.000 / 1.000 |" in as_markdown(report)


def test_the_json_has_every_figure() -> None:
    written = json.loads(json.dumps(asdict(make_report({"commit": "abc1234"}, MEASURED))))
    assert written["facts"] == {"commit": "abc1234"}
    assert written["rows"][0]["scenario"] == {"mode": "hybrid", "connections": 1}
    assert written["rows"][0]["ratio_to_bare"] == {"median": 0.25, "lowest": 0.25, "highest": 0.5}
    assert written["rows"][0]["stages_ms"]["search"] == {"median": 0.5, "p99": 1.0}
    assert written["overheads"][0]["client_ms"] == pytest.approx(0.85)
