"""Figures of `make bench-peers`: a row per contestant, ratios between ours and the peers, and equal rankings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.harness.generator import Measurement
from loadtest.harness.report import Quantiles, Spread, failures_text, markdown, summary, table, yes

ALONE = 1
"""The number of connections at which latency is compared."""
# Times the requests per second of a peer, and the share of its median at one connection.
GOAL = 3.0


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant at one number of connections."""

    name: str
    connections: int
    requests_per_second: Spread
    latency_ms: Quantiles
    processor_ms: Spread
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster ours is than a peer: by median latency at one connection, else by requests per second."""

    own: str
    peer: str
    connections: int
    times: Spread


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of queries with the reference's first hit, and of hits that are in the reference's ranking too."""

    name: str
    same_first: float
    same_top: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run."""

    facts: dict[str, str]
    rows: list[Row]
    ratios: list[Ratio]
    agreements: list[Agreement]

    @property
    def failures(self) -> int:
        return sum(sum(row.failures.values()) for row in self.rows)


def make_report(
    facts: Mapping[str, str],
    measured: Mapping[tuple[str, int], Sequence[Measurement]],
    own: Sequence[str],
    agreements: Sequence[Agreement],
) -> Report:
    """`measured` has the rounds of every contestant by name and connections; those not in `own` are peers."""
    ratios = [
        Ratio(mine, name, connections, times(measured[mine, connections], rounds, connections))
        for mine in own
        for (name, connections), rounds in measured.items()
        if name not in own
    ]
    return Report(dict(facts), [_row(*name, rounds) for name, rounds in measured.items()], ratios, list(agreements))


def times(own: Iterable[Measurement], peer: Iterable[Measurement], connections: int) -> Spread:
    """Compares round by round: the two ran side by side, so both saw the same other load."""
    pairs = list(zip(own, peer, strict=True))
    if connections == ALONE:
        return Spread.of([median(theirs.latency_ms) / median(ours.latency_ms) for ours, theirs in pairs])
    return Spread.of([ours.requests_per_second / theirs.requests_per_second for ours, theirs in pairs])


def agreement(name: str, rankings: Sequence[Sequence[str]], reference: Sequence[Sequence[str]]) -> Agreement:
    """Rankings are ids, best first, one per query."""
    pairs = list(zip(rankings, reference, strict=True))
    first = sum(given[:1] == expected[:1] for given, expected in pairs)
    top = sum(len(set(given) & set(expected)) / len(expected) for given, expected in pairs)
    return Agreement(name, first / len(pairs), top / len(pairs))


def _row(name: str, connections: int, rounds: Sequence[Measurement]) -> Row:
    processor_ms = Spread.of([1000 * one.processor_seconds / len(one.latency_ms) for one in rounds])
    speed, latencies, failures = summary(rounds)
    return Row(name, connections, speed, Quantiles.of(latencies), processor_ms, failures)


def as_markdown(report: Report) -> str:
    throughput = [
        f"{row.name} | {row.connections} | {row.requests_per_second:.0f} | {row.latency_ms.median:.2f} | "
        f"{row.latency_ms.p99:.2f} | {row.processor_ms:.1f} | {failures_text(row.failures)}"
        for row in report.rows
    ]
    ratios = []
    for one in report.ratios:
        alone = one.connections == ALONE
        what = "median latency at 1 connection" if alone else f"requests/s at {one.connections} connections"
        ratios.append(f"{one.own} against {one.peer} | {what} | {one.times:.2f} | {yes(one.times.median >= GOAL)}")
    agreements = [f"{one.name} | {one.same_first:.0%} | {one.same_top:.0%}" for one in report.agreements]
    columns = "contestant | connections | requests/s (spread) | median ms | p99 ms | processor ms a request | failures"
    return markdown(
        report.facts,
        table(columns, throughput),
        table(f"ours against | measure | times (spread) | at least {GOAL:.0f}", ratios),
        table("contestant | same first hit | same among the first ten", agreements),
    )
