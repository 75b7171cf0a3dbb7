"""Rounds of several contestants to the ratios between ours and theirs, and to Markdown. Starts nothing, asks nobody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from loadtest.harness.client import Measurement
from loadtest.harness.tables import Quantiles, Spread, fact_lines, failures_text, heading, line, pooled

# "At least three times the requests per second, a median at one connection of at most a third."
GOAL = 3.0
ALONE = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of one contestant, and the processor time that its server used meanwhile."""

    measured: Measurement
    processor_seconds: float

    @property
    def processor_ms(self) -> float:
        """Milliseconds of processor time for each answer."""
        return 1000 * self.processor_seconds / len(self.measured.latency_ms)


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant over so many connections."""

    name: str
    connections: int
    requests_per_second: Spread
    latency_ms: Quantiles
    processor_ms: Spread
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster ours is than a peer, round by round: by requests per second where there are several
    connections, by median latency where there is one."""

    own: str
    peer: str
    connections: int
    times: Spread


@dataclass(frozen=True, slots=True)
class Agreement:
    """How much of the reference's ranking a contestant gives too, over the same queries: shares from 0 to 1."""

    name: str
    same_first: float
    same_top: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one run has to say."""

    facts: dict[str, str]
    rows: list[Row]
    ratios: list[Ratio]
    agreements: list[Agreement]

    @property
    def failures(self) -> int:
        return sum(sum(row.failures.values()) for row in self.rows)


def make_report(
    facts: Mapping[str, str],
    measured: Mapping[tuple[str, int], Sequence[Turn]],
    own: Sequence[str],
    agreements: Sequence[Agreement],
) -> Report:
    """`measured` has the rounds of every contestant by name and connections; those not in `own` are peers."""
    rows = [_row(name, connections, rounds) for (name, connections), rounds in measured.items()]
    ratios = [
        Ratio(mine, name, connections, times(measured[mine, connections], rounds, connections))
        for mine in own
        for (name, connections), rounds in measured.items()
        if name not in own
    ]
    return Report(dict(facts), rows, ratios, list(agreements))


def times(own: Iterable[Turn], peer: Iterable[Turn], connections: int) -> Spread:
    """The two of one round ran side by side, so what the machine did meanwhile is in both."""
    pairs = [(ours.measured, theirs.measured) for ours, theirs in zip(own, peer, strict=True)]
    if connections == ALONE:
        return Spread.of([median(theirs.latency_ms) / median(ours.latency_ms) for ours, theirs in pairs])
    return Spread.of([ours.requests_per_second / theirs.requests_per_second for ours, theirs in pairs])


def agreement(name: str, rankings: Sequence[Sequence[str]], reference: Sequence[Sequence[str]]) -> Agreement:
    """Rankings are ids, best first, one per query."""
    pairs = list(zip(rankings, reference, strict=True))
    first = sum(given[:1] == expected[:1] for given, expected in pairs)
    top = sum(len(set(given) & set(expected)) / len(expected) for given, expected in pairs)
    return Agreement(name, first / len(pairs), top / len(pairs))


def as_markdown(report: Report) -> str:
    return "\n".join(
        [
            *fact_lines(report.facts),
            *_throughput(report.rows),
            *_ratios(report.ratios),
            *_agreements(report.agreements),
        ]
    )


def _row(name: str, connections: int, turns: Sequence[Turn]) -> Row:
    rounds = [turn.measured for turn in turns]
    failures: Counter[str] = Counter()
    for measurement in rounds:
        failures.update(measurement.failures)
    speed = Spread.of([measurement.requests_per_second for measurement in rounds])
    latency = Quantiles.of(pooled(one.latency_ms for one in rounds))
    return Row(name, connections, speed, latency, Spread.of([turn.processor_ms for turn in turns]), dict(failures))


def _throughput(rows: Iterable[Row]) -> Iterator[str]:
    columns = ("connections", "requests/s (spread)", "median ms", "p99 ms", "processor ms a request", "failures")
    yield from heading("contestant", *columns)
    for row in rows:
        speed, latency = row.requests_per_second.text(".0f"), row.latency_ms
        yield line(
            row.name,
            str(row.connections),
            speed,
            f"{latency.median:.2f}",
            f"{latency.p99:.2f}",
            row.processor_ms.text(".1f"),
            failures_text(row.failures),
        )
    yield ""


def _ratios(ratios: Iterable[Ratio]) -> Iterator[str]:
    yield from heading("ours against", "measure", "times (spread)", f"at least {GOAL:.0f}")
    for ratio in ratios:
        alone = ratio.connections == ALONE
        measure = "median latency at 1 connection" if alone else f"requests/s at {ratio.connections} connections"
        met = "yes" if ratio.times.median >= GOAL else "no"
        yield line(f"{ratio.own} against {ratio.peer}", measure, ratio.times.text(".2f"), met)
    yield ""


def _agreements(agreements: Iterable[Agreement]) -> Iterator[str]:
    yield from heading("contestant", "same first hit", "same among the first ten")
    for one in agreements:
        yield line(one.name, f"{one.same_first:.0%}", f"{one.same_top:.0%}")
    yield ""
