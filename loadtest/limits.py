"""Compares the statistics of a Locust run with latency, error and refusal limits."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

SEARCH, REFUSED = "search", "refused"


def verdict(entries: Iterable[Any], limits: Namespace) -> tuple[bool, str]:
    """Returns whether Locust's entries keep the limits, and one line that says so.

    Latency is that of the slowest entry whose name begins with `search`: single queries; `p95_ms` and `p99_ms` may be
    None. `errors` and `refused` are shares; refused requests (429) are left out of the error share.
    """
    rows = [entry for entry in entries if entry.num_requests]
    searches = [entry for entry in rows if entry.name.startswith(SEARCH)]
    if not searches:
        return (
            False,
            "SLO not judged: no search was made: is the service at this host, and did the run last long enough?",
        )
    figures: list[tuple[str, float, float | None, str]] = []
    for share, limit in ((0.95, limits.p95_ms), (0.99, limits.p99_ms)):
        slowest = max(searches, key=lambda entry: entry.get_response_time_percentile(share))
        milliseconds = slowest.get_response_time_percentile(share)
        figures.append((f"p{100 * share:.0f} of {slowest.name}", milliseconds, limit, "{:g} ms"))
    requests = sum(entry.num_requests for entry in rows)
    refused = sum(entry.num_requests for entry in rows if entry.name.startswith(REFUSED))
    failures = sum(entry.num_failures for entry in rows)
    figures.append(("errors", failures / max(requests - refused, 1), limits.errors, "{:.2%}"))
    figures.append(("refused", refused / requests, limits.refused, "{:.2%}"))
    misses = [
        f"{name} {shape.format(value)} (limit {shape.format(limit)})"
        for name, value, limit, shape in figures
        if limit is not None and value > limit
    ]
    if misses:
        return False, f"SLO missed: {'; '.join(misses)}"
    return True, ", ".join([f"SLO met: {requests} requests", *(f"{n} {s.format(v)}" for n, v, _, s in figures)])
