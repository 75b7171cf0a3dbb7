"""The limits of a load test: what is counted, what is exceeded, and its one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from loadtest.limits import Limits, NotJudged, Row, judge, verdict

ROWS = [
    Row("search hybrid", requests=80, failures=1, p95_ms=40, p99_ms=90),
    Row("search by URL", 20, 0, 60, 70),
    Row("batch", 10, 1, 900, 950),
    Row("refused (429)", 10, 0, 2, 3),
]
OPEN = Limits(p95_ms=None, p99_ms=None, errors=1.0, refused=1.0)


class Entry(SimpleNamespace):
    """A row as Locust has it."""

    def get_response_time_percentile(self, share: float) -> float:
        percentiles: dict[float, float] = self.percentiles
        return percentiles[share]


def entries(rows: list[Row] = ROWS) -> list[Entry]:
    made = [
        Entry(
            name=row.name,
            num_requests=row.requests,
            num_failures=row.failures,
            percentiles={0.95: row.p95_ms, 0.99: row.p99_ms},
        )
        for row in rows
    ]
    return [*made, Entry(name="document", num_requests=0, num_failures=0, percentiles={0.95: 0, 0.99: 0})]


def test_rows_are_those_with_requests() -> None:
    rows = Row.of(entries())
    assert [row.name for row in rows] == ["search hybrid", "search by URL", "batch", "refused (429)"]
    assert rows[0] == Row("search hybrid", requests=80, failures=1, p95_ms=40, p99_ms=90)


def test_latency_is_that_of_the_slowest_kind_of_search() -> None:
    assert judge(ROWS, Limits(60, 90, 1, 1)).misses == ()
    assert judge(ROWS, Limits(59, None, 1, 1)).misses == ("p95 of search by URL 60 ms (limit 59 ms)",)
    assert judge(ROWS, Limits(None, 89, 1, 1)).misses == ("p99 of search hybrid 90 ms (limit 89 ms)",)


def test_errors_and_refusals_are_shares_of_their_own() -> None:
    assert judge(ROWS, Limits(None, None, 2 / 110, 10 / 120)).misses == ()
    assert judge(ROWS, Limits(None, None, 0.01, 0.05)).misses == (
        "errors 1.82% (limit 1.00%)",
        "refused 8.33% (limit 5.00%)",
    )


def test_every_figure_is_in_the_summary() -> None:
    assert judge(ROWS, OPEN).summary == (
        "120 requests, p95 of search by URL 60 ms, p99 of search hybrid 90 ms, errors 1.82%, refused 8.33%"
    )


def test_a_run_without_a_search_meets_no_limit() -> None:
    with pytest.raises(NotJudged, match="no search was made"):
        judge([Row("page", 5, 0, 1, 1)], OPEN)


def test_limits_met_are_one_line() -> None:
    met, text = verdict(entries(), Limits(60, 90, 0.1, 0.1))
    assert met
    assert text.startswith("SLO met: 120 requests")
    assert "\n" not in text


def test_limits_missed_are_one_line() -> None:
    met, text = verdict(entries(), Limits(50, None, 0.0, 0.0))
    assert not met
    assert text == (
        "SLO missed: p95 of search by URL 60 ms (limit 50 ms); errors 1.82% (limit 0.00%); refused 8.33% (limit 0.00%)"
    )


@pytest.mark.parametrize("rows", [[], [Row("page", 5, 0, 1, 1)], [Row("refused (429)", 5, 0, 1, 1)]])
def test_a_run_without_searches_is_not_judged(rows: list[Row]) -> None:
    met, text = verdict(entries(rows), OPEN)
    assert not met
    assert text.startswith("SLO not judged: ")
    assert "\n" not in text
