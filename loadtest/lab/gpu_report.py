"""What the GPU benchmark found, line by line, and its goals. Starts nothing, asks nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.harness.tables import fact_lines, failures_text, heading, line
from loadtest.lab.gpu_usage import GpuUsage
from loadtest.lab.wrk import Load

# What the goal asks for: searches a second with their p99, and the median of one connection.
GOAL_PER_SECOND, GOAL_P99_MS, GOAL_ALONE_MS = 10_000, 25.0, 4.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of the service at one moment."""

    queries: float
    batches: float
    engine_seconds: float
    engine_cores: float
    workers_cores: float

    def since(self, before: Reading, seconds: float) -> Usage:
        batches = self.batches - before.batches
        return Usage(
            (self.queries - before.queries) / batches if batches else 0.0,
            (self.engine_seconds - before.engine_seconds) / seconds,
            (self.engine_cores - before.engine_cores) / seconds,
            (self.workers_cores - before.workers_cores) / seconds,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """What the service used while it was asked: queries in a batch, busy share of the engine, cores."""

    batch: float
    engine_busy: float
    engine_cores: float
    workers_cores: float


@dataclass(frozen=True, slots=True)
class Row:
    """One load, and what was used meanwhile."""

    load: Load
    usage: Usage
    gpu: GpuUsage | None


def as_markdown(facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    columns = ("searches/s", "p50 ms", "p99 ms", "batch", "engine busy", "GPU busy", "cores: engine", "workers", "wrk")
    lines = [*fact_lines(facts), *heading("connections", *columns, "failures")]
    for row in rows:
        load, usage = row.load, row.usage
        lines.append(
            line(
                str(load.connections),
                f"{load.searches_per_second:,.0f}",
                f"{load.p50_ms:.2f}",
                f"{load.p99_ms:.2f}",
                f"{usage.batch:.1f}",
                f"{usage.engine_busy:.0%}",
                "–" if row.gpu is None else f"{row.gpu.busy:.0%}",
                f"{usage.engine_cores:.1f}",
                f"{usage.workers_cores:.1f}",
                f"{load.processor_seconds / load.seconds:.1f}",
                failures_text(load.failures),
            )
        )
    return "\n".join([*lines, "", *_goals(rows), ""])


def _goals(rows: Sequence[Row]) -> list[str]:
    quick = [row.load for row in rows if row.load.p99_ms <= GOAL_P99_MS and not row.load.failures]
    best = max(quick, key=lambda load: load.searches_per_second, default=None)
    most = 0.0 if best is None else best.searches_per_second
    where = "no line" if best is None else f"{most:,.0f} at {best.connections} connections"
    goals = [
        f"- most searches/s with a p99 of at most {GOAL_P99_MS:.0f} ms: {where} "
        f"(at least {GOAL_PER_SECOND:,}: {_yes(most >= GOAL_PER_SECOND)})"
    ]
    alone = [row.load.p50_ms for row in rows if row.load.connections == 1]
    goals += [
        f"- p50 of one connection: {p50_ms:.2f} ms (at most {GOAL_ALONE_MS:.0f}: {_yes(p50_ms <= GOAL_ALONE_MS)})"
        for p50_ms in alone
    ]
    return goals


def _yes(met: bool) -> str:
    return "yes" if met else "no"
