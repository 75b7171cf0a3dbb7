"""Compares the statistics of a Locust run with latency, error and refusal limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SEARCH, REFUSED = "search", "refused"


class NotJudged(Exception):
    """A run that no limit can be applied to."""


@dataclass(frozen=True, slots=True)
class Row:
    """The requests of one name."""

    name: str
    requests: int
    failures: int
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, entries: Iterable[Any]) -> list[Row]:
        """Locust's entries that have requests."""
        return [
            cls(one.name, one.num_requests, one.num_failures, *map(one.get_response_time_percentile, (0.95, 0.99)))
            for one in entries
            if one.num_requests
        ]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may reach and not exceed; None: no limit. Shares are between 0 and 1."""

    p95_ms: float | None
    p99_ms: float | None
    errors: float
    refused: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures of a run, and the limits that they exceed."""

    misses: tuple[str, ...]
    summary: str


def judge(rows: Sequence[Row], limits: Limits) -> Verdict:
    """Compares the slowest search row and the shares of all rows with the limits; raises NotJudged without a search.

    Latency is that of the rows whose name begins with `search`: single queries. The error share leaves out refused
    requests (429), which have a limit of their own.
    """
    searches = [row for row in rows if row.name.startswith(SEARCH)]
    if not searches:
        raise NotJudged("no search was made: is the service at this host, and did the run last long enough?")
    refused = sum(row.requests for row in rows if row.name.startswith(REFUSED))
    requests = sum(row.requests for row in rows)
    failures = sum(row.failures for row in rows)
    slow95, slow99 = max(searches, key=lambda row: row.p95_ms), max(searches, key=lambda row: row.p99_ms)
    figures = (
        (f"p95 of {slow95.name}", slow95.p95_ms, limits.p95_ms, "{:g} ms"),
        (f"p99 of {slow99.name}", slow99.p99_ms, limits.p99_ms, "{:g} ms"),
        ("errors", failures / max(requests - refused, 1), limits.errors, "{:.2%}"),
        ("refused", refused / requests, limits.refused, "{:.2%}"),
    )
    misses = tuple(
        f"{name} {shape.format(value)} (limit {shape.format(limit)})"
        for name, value, limit, shape in figures
        if limit is not None and value > limit
    )
    summary = ", ".join(f"{name} {shape.format(value)}" for name, value, _, shape in figures)
    return Verdict(misses, f"{requests} requests, {summary}")


def verdict(entries: Iterable[Any], limits: Limits) -> tuple[bool, str]:
    """Whether Locust's statistics keep the limits, and one line that says so."""
    try:
        judged = judge(Row.of(entries), limits)
    except NotJudged as error:
        return False, f"SLO not judged: {error}"
    if judged.misses:
        return False, f"SLO missed: {'; '.join(judged.misses)}"
    return True, f"SLO met: {judged.summary}"
