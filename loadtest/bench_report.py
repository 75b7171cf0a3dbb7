"""Measurements to figures, figures to Markdown. Pure arithmetic and text: starts nothing and asks nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from loadtest.harness.client import STAGES, Measurement
from loadtest.harness.tables import Quantiles, Spread, fact_lines, failures_text, heading, line, pooled

BARE = "bare framework"
CACHED = "cache hit"
# The work itself; what a request takes beyond these is the service's own overhead.
WORK = ("encode", "search", "fetch")
OVERHEAD_LIMIT_MS = 1.0
HIT_LIMIT_MS = 0.5
DASH = "–"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who is asked (a search mode of the service, what its cache holds, or BARE) over how many connections."""

    mode: str
    connections: int


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a scenario; `ratio` and `stages_ms` only where they are the service's."""

    scenario: Scenario
    requests: int
    requests_per_second: Spread
    ratio_to_bare: Spread | None
    latency_ms: Quantiles
    stages_ms: dict[str, Quantiles]
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What one client waits for beyond encode + search + fetch, medians over requests, in milliseconds.

    `client_ms` is measured at the client, so it includes the client itself, the loopback and the framework; `bare_ms`
    is all that for the constant answer, and `beyond_bare_ms` the difference. `server_ms` is the part that
    `timings_ms` sees: from the parsed request to the finished body.
    """

    mode: str
    client_ms: float
    bare_ms: float
    beyond_bare_ms: float
    server_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run has to say. `facts` are what was measured, on what, by which command."""

    facts: dict[str, str]
    rows: list[Row]
    overheads: list[Overhead]

    @property
    def failures(self) -> int:
        return sum(sum(row.failures.values()) for row in self.rows)


def make_report(facts: Mapping[str, str], measured: Mapping[Scenario, Sequence[Measurement]]) -> Report:
    """`measured` has every scenario's rounds in their order; each mode at n connections meets BARE at n."""
    rows = [_row(scenario, rounds, measured) for scenario, rounds in measured.items()]
    alone = {scenario.mode: rounds for scenario, rounds in measured.items() if scenario.connections == 1}
    bare = alone.pop(BARE)
    overheads = [overhead(mode, rounds, bare) for mode, rounds in alone.items() if mode != CACHED]
    return Report(dict(facts), rows, overheads)


def overhead(mode: str, rounds: Iterable[Measurement], bare: Iterable[Measurement]) -> Overhead:
    """The median, over requests, of what each took beyond its own encode + search + fetch."""
    at_client, at_server = [], []
    for measurement in rounds:
        timings = measurement.timings_ms
        for latency, total, *work in zip(
            measurement.latency_ms, timings["total"], *(timings[stage] for stage in WORK), strict=True
        ):
            at_client.append(latency - sum(work))
            at_server.append(total - sum(work))
    client_ms = median(at_client)
    bare_ms = median(pooled(measurement.latency_ms for measurement in bare))
    return Overhead(mode, client_ms, bare_ms, client_ms - bare_ms, median(at_server))


def as_json(report: Report) -> dict[str, Any]:
    return asdict(report)


def as_markdown(report: Report) -> str:
    """The facts and a table for each question, ready for docs/benchmarks.md."""
    return "\n".join(
        [
            *fact_lines(report.facts),
            *_throughput(report.rows),
            *_stages(report.rows),
            *_hits(report.rows),
            *_overheads(report.overheads),
        ]
    )


def _row(scenario: Scenario, rounds: Sequence[Measurement], measured: Mapping[Scenario, Sequence[Measurement]]) -> Row:
    speeds = [measurement.requests_per_second for measurement in rounds]
    latencies = pooled(measurement.latency_ms for measurement in rounds)
    ratio, stages = None, {}
    if scenario.mode != BARE:
        bare = [measurement.requests_per_second for measurement in measured[Scenario(BARE, scenario.connections)]]
        # Round by round: the two ran side by side, so what the machine did meanwhile is in both.
        ratio = Spread.of([own / other for own, other in zip(speeds, bare, strict=True)])
        stages = {stage: Quantiles.of(pooled(one.timings_ms[stage] for one in rounds)) for stage in STAGES}
    failures: Counter[str] = Counter()
    for measurement in rounds:
        failures.update(measurement.failures)
    return Row(scenario, len(latencies), Spread.of(speeds), ratio, Quantiles.of(latencies), stages, dict(failures))


def _throughput(rows: Iterable[Row]) -> Iterator[str]:
    yield from heading(
        "mode", "connections", "requests/s (spread)", "ratio to bare (spread)", "median ms", "p99 ms", "failures"
    )
    for row in rows:
        ratio = DASH if row.ratio_to_bare is None else row.ratio_to_bare.text(".3f")
        yield line(
            row.scenario.mode,
            str(row.scenario.connections),
            row.requests_per_second.text(".0f"),
            ratio,
            f"{row.latency_ms.median:.2f}",
            f"{row.latency_ms.p99:.2f}",
            failures_text(row.failures),
        )
    yield ""


def _stages(rows: Iterable[Row]) -> Iterator[str]:
    yield from heading("median / p99 ms", "connections", *STAGES)
    for row in rows:
        if row.stages_ms:
            cells = [f"{row.stages_ms[stage].median:.2f} / {row.stages_ms[stage].p99:.2f}" for stage in STAGES]
            yield line(row.scenario.mode, str(row.scenario.connections), *cells)
    yield ""


def _hits(rows: Iterable[Row]) -> Iterator[str]:
    cached = [row for row in rows if row.scenario.mode == CACHED]
    if not cached:
        return
    below = f"below {HIT_LIMIT_MS} ms"
    yield from heading(f"{CACHED}, median / p99 ms", "connections", "inside the server", below, "seen by the client")
    for row in cached:
        total, latency = row.stages_ms["total"], row.latency_ms
        yield line(
            "process LRU",
            str(row.scenario.connections),
            f"{total.median:.3f} / {total.p99:.3f}",
            "yes" if total.p99 < HIT_LIMIT_MS else "no",
            f"{latency.median:.3f} / {latency.p99:.3f}",
        )
    yield ""


def _overheads(overheads: Iterable[Overhead]) -> Iterator[str]:
    yield from heading(
        "one connection, median ms beyond encode + search + fetch",
        "seen by the client",
        f"below {OVERHEAD_LIMIT_MS:.0f} ms",
        f"{BARE}'s latency",
        "beyond the bare framework",
        "inside the server",
    )
    for one in overheads:
        met = "yes" if one.client_ms < OVERHEAD_LIMIT_MS else "no"
        figures = [f"{value:.3f}" for value in (one.client_ms, one.bare_ms, one.beyond_bare_ms, one.server_ms)]
        yield line(one.mode, figures[0], met, *figures[1:])
    yield ""
