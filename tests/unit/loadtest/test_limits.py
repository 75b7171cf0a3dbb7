"""The limits of a load test: what is counted, what is exceeded, and the summary line."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import pytest

from loadtest.limits import verdict


@dataclass
class Entry:
    """The requests of one name, as Locust has them."""

    name: str
    num_requests: int
    num_failures: int
    p95_ms: float
    p99_ms: float

    def get_response_time_percentile(self, share: float) -> float:
        return {0.95: self.p95_ms, 0.99: self.p99_ms}[share]


UNUSED = Entry("search never made", num_requests=0, num_failures=0, p95_ms=9000, p99_ms=9000)
ENTRIES = [
    Entry("search hybrid", num_requests=80, num_failures=1, p95_ms=40, p99_ms=90),
    Entry("search by URL", 20, 0, 60, 70),
    Entry("batch", 10, 1, 900, 950),
    Entry("refused (429)", 10, 0, 2, 3),
    UNUSED,
]


def limits(
    p95_ms: float | None = None, p99_ms: float | None = None, errors: float = 1, refused: float = 1
) -> Namespace:
    return Namespace(p95_ms=p95_ms, p99_ms=p99_ms, errors=errors, refused=refused)


def test_names_without_requests_are_not_counted() -> None:
    assert verdict(ENTRIES, limits(60, 90)) == verdict(ENTRIES[:-1], limits(60, 90))
    assert verdict(ENTRIES, limits(60, 90))[0]


def test_latency_is_that_of_the_slowest_kind_of_search() -> None:
    assert verdict(ENTRIES, limits(60, 90))[0]
    assert verdict(ENTRIES, limits(59)) == (False, "SLO missed: p95 of search by URL 60 ms (limit 59 ms)")
    assert verdict(ENTRIES, limits(None, 89)) == (False, "SLO missed: p99 of search hybrid 90 ms (limit 89 ms)")


def test_errors_and_refusals_are_counted_separately() -> None:
    assert verdict(ENTRIES, limits(errors=2 / 110, refused=10 / 120))[0]
    _, text = verdict(ENTRIES, limits(errors=0.01, refused=0.05))
    assert text == "SLO missed: errors 1.82% (limit 1.00%); refused 8.33% (limit 5.00%)"


def test_every_figure_is_in_the_summary() -> None:
    assert verdict(ENTRIES, limits())[1] == (
        "SLO met: 120 requests, p95 of search by URL 60 ms, p99 of search hybrid 90 ms, errors 1.82%, refused 8.33%"
    )


def test_a_run_without_a_search_meets_no_limit() -> None:
    met, text = verdict([Entry("page", 5, 0, 1, 1)], limits())
    assert not met
    assert "no search was made" in text


def test_met_limits_give_one_line() -> None:
    met, text = verdict(ENTRIES, limits(60, 90, 0.1, 0.1))
    assert met
    assert text.startswith("SLO met: 120 requests")
    assert "\n" not in text


def test_missed_limits_give_one_line() -> None:
    met, text = verdict(ENTRIES, limits(50, None, 0.0, 0.0))
    assert not met
    assert text == (
        "SLO missed: p95 of search by URL 60 ms (limit 50 ms); errors 1.82% (limit 0.00%); refused 8.33% (limit 0.00%)"
    )


@pytest.mark.parametrize("entries", [[], [UNUSED], [Entry("page", 5, 0, 1, 1)], [Entry("refused (429)", 5, 0, 1, 1)]])
def test_a_run_without_searches_is_not_judged(entries: list[Entry]) -> None:
    met, text = verdict(entries, limits())
    assert not met
    assert text.startswith("SLO not judged: ")
    assert "\n" not in text
