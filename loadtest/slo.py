"""Holds the statistics of a Locust run to limits: one line, and exit code 1 where a limit is exceeded.

    python -m loadtest.slo var/loadtest/run_stats.csv --p95-ms 100 --p99-ms 250

Latency is judged in every row whose name begins with `search`: single queries. Errors are failures among all requests
but the refused ones (429), which have a limit of their own. A run without a search meets no limit. Reads Locust's CSV,
whose percentiles are whole milliseconds, and two digits from 100 ms on; knows nothing of the service.
"""

from __future__ import annotations

import csv
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEARCH, REFUSED, TOTAL = "search", "refused", "Aggregated"


class BadStats(Exception):
    """A file that is not the statistics of a run."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the statistics: the requests of one name."""

    name: str
    requests: int
    failures: int
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may reach and not exceed; None: not judged. Shares are of 1."""

    p95_ms: float | None
    p99_ms: float | None
    errors: float
    refused: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures of a run against its limits."""

    misses: tuple[str, ...]
    summary: str


def read_rows(path: Path) -> list[Row]:
    """The rows with requests, without the sum of all."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = [line for line in csv.DictReader(file) if line["Name"] != TOTAL and line["Request Count"] != "0"]
        return [
            Row(line["Name"], int(line["Request Count"]), int(line["Failure Count"]),
                float(line["95%"]), float(line["99%"]))
            for line in lines
        ]  # fmt: skip
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadStats(f"{path} is not Locust's _stats.csv ({type(error).__name__}: {error})") from error


def judge(rows: Sequence[Row], limits: Limits) -> Verdict:
    """Compares the worst search row and the shares of all rows with the limits."""
    searches = [row for row in rows if row.name.startswith(SEARCH)]
    if not searches:
        raise BadStats("no search was made: is the service at this host, and did the run last long enough?")
    refused = sum(row.requests for row in rows if row.name.startswith(REFUSED))
    requests = sum(row.requests for row in rows)
    failures = sum(row.failures for row in rows)
    slow95, slow99 = max(searches, key=lambda row: row.p95_ms), max(searches, key=lambda row: row.p99_ms)
    errors_share, refused_share = failures / max(requests - refused, 1), refused / requests
    figures = (
        (f"p95 of {slow95.name}", slow95.p95_ms, limits.p95_ms, "{:g} ms"),
        (f"p99 of {slow99.name}", slow99.p99_ms, limits.p99_ms, "{:g} ms"),
        ("errors", errors_share, limits.errors, "{:.2%}"),
        ("refused", refused_share, limits.refused, "{:.2%}"),
    )
    misses = tuple(
        f"{name} {shape.format(value)} (limit {shape.format(limit)})"
        for name, value, limit, shape in figures
        if limit is not None and value > limit
    )
    said = ", ".join(f"{name} {shape.format(value)}" for name, value, _, shape in figures)
    return Verdict(misses, f"{requests} requests, {said}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="slo.py", description="Hold the statistics of a Locust run to limits.")
    parser.add_argument("stats", type=Path, help="the _stats.csv that locust --csv wrote")
    parser.add_argument("--p95-ms", type=float, help="most milliseconds for 95 %% of each kind of search")
    parser.add_argument("--p99-ms", type=float, help="most milliseconds for 99 %% of each kind of search")
    parser.add_argument("--errors", type=float, default=0.0, help="largest share of failures (%(default)s)")
    parser.add_argument("--refused", type=float, default=0.0, help="largest share of answers of 429 (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        verdict = judge(read_rows(given.stats), Limits(given.p95_ms, given.p99_ms, given.errors, given.refused))
    except BadStats as error:
        print(f"SLO not judged: {error}", file=sys.stderr)
        return 1
    if verdict.misses:
        print(f"SLO missed: {'; '.join(verdict.misses)}", file=sys.stderr)
        return 1
    print(f"SLO met: {verdict.summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
