"""`make bench`: measures the speed of `/v1/search`, and how much of a request is the service's own work.

  python -m loadtest.bench                        the example corpus, a service started for the run, caches off
  python -m loadtest.bench --collection FOLDER    another published collection
  python -m loadtest.bench --url http://127.0.0.1:8000    a service that runs already, with the settings it has

How to read the output
- A round measures every scenario once, the service right beside the bare framework (FastAPI and uvicorn with the same
  server settings, answering a constant of typical size); every second round goes backwards.
- Requests per second and ratios are medians over the rounds with (lowest–highest). A wide spread means a busy machine:
  do not publish it. Latencies and stages are over all requests of all rounds.
- Latency is the client's, from writing the request to the last byte of the answer; stages are the service's own
  `timings_ms`. `queue` includes the wait for the batch before and the way to the engine's thread and back.
- "Cache hit" is a second service with its process cache on and only repeated queries.
- The last table has what a request of one connection took beyond its own encode + search + fetch. "Seen by the client"
  includes client, loopback and framework; "inside the server" is `total` less encode + search + fetch.
- Failures are answers that are not 200, are malformed, lack `timings_ms` or never came. They set exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from loadtest.answers import read_queries
from loadtest.harness import QUERIES, BenchError
from loadtest.harness.generator import MAX_SECONDS, STAGES, Job, Measurement, measure
from loadtest.harness.machine import settings, versions
from loadtest.harness.report import (
    Program,
    Quantiles,
    Spread,
    exit_with,
    failures_text,
    markdown,
    publish,
    say,
    summary,
    table,
    yes,
)
from loadtest.harness.servers import CACHE, FORCED, bare_server, build_example, care_server, get, running

ROUNDS = 5
SECONDS = 2.0
WARM_UP_SECONDS = 1.0
BARE, CACHED = "bare framework", "cache hit"
# What a request takes beyond these stages is the service's overhead.
WORK = ("encode", "search", "fetch")
OVERHEAD_LIMIT_MS = 1.0
HIT_LIMIT_MS = 0.5


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is measured (a search mode, CACHED or BARE) over how many connections."""

    mode: str
    connections: int


# One round, in its order: the two sides of each ratio are neighbours.
SCENARIOS = (
    Scenario("dense", 1),
    Scenario("lexical", 1),
    Scenario(CACHED, 1),
    *(Scenario(mode, connections) for connections in (1, 8, 32) for mode in ("hybrid", BARE)),
)
TYPICAL = Scenario("hybrid", 1)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a scenario; BARE has no ratio and no stages."""

    scenario: Scenario
    requests: int
    requests_per_second: Spread
    ratio_to_bare: Spread | None
    latency_ms: Quantiles
    stages_ms: dict[str, Quantiles]
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds of one connection beyond encode + search + fetch, medians over requests.

    `client_ms` is measured at the client; `bare_ms` is the bare framework's latency, and `beyond_bare_ms` the
    difference. `server_ms` is the part that `timings_ms` sees: from the parsed request to the finished body.
    """

    mode: str
    client_ms: float
    bare_ms: float
    beyond_bare_ms: float
    server_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one run; `facts` are the command, the machine and what was measured."""

    facts: dict[str, str]
    rows: list[Row]
    overheads: list[Overhead]

    @property
    def failures(self) -> int:
        return sum(sum(row.failures.values()) for row in self.rows)


class Bench:
    """Runs the rounds; the service is at `service_url`, the caching one, if any, at `cached_url`."""

    def __init__(self, service_url: str, queries: Sequence[str], seconds: float, cached_url: str | None = None) -> None:
        self._urls = {CACHED: cached_url} if cached_url else {}
        self._service_url = service_url
        self._queries = queries
        self._seconds = seconds
        self._sent = 0
        self.scenarios = [scenario for scenario in SCENARIOS if cached_url or scenario.mode != CACHED]

    def warm_up(self) -> int:
        """Runs every scenario of the service once; returns the size of a typical answer in bytes."""
        size = 0
        for scenario in self.scenarios:
            if scenario.mode == CACHED:
                self._fill_cache()
            elif scenario.mode != BARE:
                measured = self._measure(scenario, min(self._seconds, WARM_UP_SECONDS))
                size = round(median(measured.body_bytes)) if scenario == TYPICAL else size
        return size

    def run(self, bare_url: str, rounds: int) -> dict[Scenario, list[Measurement]]:
        """Returns every scenario's measurements, in the order of the rounds."""
        self._urls[BARE] = bare_url
        self._measure(Scenario(BARE, 1), min(self._seconds, WARM_UP_SECONDS))
        measured: dict[Scenario, list[Measurement]] = {scenario: [] for scenario in self.scenarios}
        for number in range(rounds):
            say(f"bench: round {number + 1} of {rounds}")
            for scenario in self.scenarios if number % 2 == 0 else reversed(self.scenarios):
                measured[scenario].append(self._measure(scenario, self._seconds))
        return measured

    def _fill_cache(self) -> None:
        """Sends every query once, so that all later ones are hits."""
        whole = len(self._queries)
        measured = measure(replace(self._job(Scenario(CACHED, 1), MAX_SECONDS), first_number=0, max_requests=whole))
        if len(measured.latency_ms) < whole:
            raise BenchError(f"the cache could not be filled: {measured.failures or 'too slow'}")

    def _measure(self, scenario: Scenario, seconds: float) -> Measurement:
        measured = measure(self._job(scenario, seconds))
        self._sent += measured.sent
        if not measured.latency_ms:
            reasons = ", ".join(measured.failures)
            raise BenchError(f"{scenario.mode}, {scenario.connections} connections: no good answer ({reasons})")
        return measured

    def _job(self, scenario: Scenario, seconds: float) -> Job:
        url = self._urls.get(scenario.mode, self._service_url)
        # The bare framework gets the requests of the service.
        mode = TYPICAL.mode if scenario.mode in (BARE, CACHED) else scenario.mode
        timings, numbered = scenario.mode != BARE, scenario.mode != CACHED
        number = self._sent
        return Job(url, self._queries, mode, scenario.connections, seconds, number, timings=timings, numbered=numbered)


def make_report(facts: Mapping[str, str], measured: Mapping[Scenario, Sequence[Measurement]]) -> Report:
    """`measured` has every scenario's rounds in their order; a mode at n connections is compared with BARE at n."""
    rows = [_row(scenario, rounds, measured) for scenario, rounds in measured.items()]
    alone = {scenario.mode: rounds for scenario, rounds in measured.items() if scenario.connections == 1}
    bare = alone.pop(BARE)
    overheads = [overhead(mode, rounds, bare) for mode, rounds in alone.items() if mode != CACHED]
    return Report(dict(facts), rows, overheads)


def _row(scenario: Scenario, rounds: Sequence[Measurement], measured: Mapping[Scenario, Sequence[Measurement]]) -> Row:
    ratio, stages = None, {}
    if scenario.mode != BARE:
        # Round by round: the two ran side by side, so both saw the same other load.
        pairs = zip(rounds, measured[Scenario(BARE, scenario.connections)], strict=True)
        ratio = Spread.of([own.requests_per_second / other.requests_per_second for own, other in pairs])
        stages = {stage: Quantiles.of(ms for one in rounds for ms in one.timings_ms[stage]) for stage in STAGES}
    speed, latencies, failures = summary(rounds)
    return Row(scenario, len(latencies), speed, ratio, Quantiles.of(latencies), stages, failures)


def overhead(mode: str, rounds: Iterable[Measurement], bare: Sequence[Measurement]) -> Overhead:
    at_client, at_server = [], []
    for one in rounds:
        stages = [one.timings_ms[stage] for stage in ("total", *WORK)]
        for latency, total, *work in zip(one.latency_ms, *stages, strict=True):
            at_client.append(latency - sum(work))
            at_server.append(total - sum(work))
    client_ms, bare_ms = median(at_client), median(summary(bare)[1])
    return Overhead(mode, client_ms, bare_ms, client_ms - bare_ms, median(at_server))


def as_markdown(report: Report) -> str:
    """Returns the facts and a table for each question, ready for docs/benchmarks.md."""
    throughput, stages, hits = [], [], []
    for row in report.rows:
        name, latency = f"{row.scenario.mode} | {row.scenario.connections}", row.latency_ms
        ratio = "–" if row.ratio_to_bare is None else f"{row.ratio_to_bare:.3f}"
        figures = f"{row.requests_per_second:.0f} | {ratio} | {latency.median:.2f} | {latency.p99:.2f}"
        throughput.append(f"{name} | {figures} | {failures_text(row.failures)}")
        if row.stages_ms:
            stages.append(" | ".join([name, *(f"{row.stages_ms[stage]:.2f}" for stage in STAGES)]))
        if row.scenario.mode == CACHED:
            total = row.stages_ms["total"]
            met = yes(total.p99 < HIT_LIMIT_MS)
            hits.append(f"process LRU | {row.scenario.connections} | {total:.3f} | {met} | {latency:.3f}")
    overheads = [
        f"{one.mode} | {one.client_ms:.3f} | {yes(one.client_ms < OVERHEAD_LIMIT_MS)} | {one.bare_ms:.3f} | "
        f"{one.beyond_bare_ms:.3f} | {one.server_ms:.3f}"
        for one in report.overheads
    ]
    tables = {
        "mode | connections | requests/s (spread) | ratio to bare (spread) | median ms | p99 ms | failures": throughput,
        " | ".join(["median / p99 ms | connections", *STAGES]): stages,
        f"{CACHED}, median / p99 ms | connections | inside the server | below {HIT_LIMIT_MS} ms | "
        "seen by the client": hits,
        f"one connection, median ms beyond encode + search + fetch | seen by the client | "
        f"below {OVERHEAD_LIMIT_MS:.0f} ms | {BARE}'s latency | beyond the bare framework | "
        "inside the server": overheads,
    }
    return markdown(report.facts, *(table(columns, rows) for columns, rows in tables.items() if rows))


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("bench", "loadtest.bench", __doc__)
    where = program.add_mutually_exclusive_group()
    where.add_argument("--url", help="a service that runs already, at http://127.0.0.1:PORT")
    where.add_argument("--collection", type=Path, help="a published collection (default: the example corpus)")
    program.add_argument("--queries", type=Path, default=QUERIES, help="JSON lines with a text each (the example's)")
    program.add_argument("--seconds", type=float, default=SECONDS, help="length of a measurement (%(default)s)")
    program.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each scenario (%(default)s)")
    program.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    report = _bench(options, facts)
    publish(as_markdown(report), report, options.json)
    return 1 if report.failures else 0


def _bench(options: argparse.Namespace, facts: dict[str, str]) -> Report:
    if options.rounds < 1:
        raise BenchError(f"--rounds must be at least 1, not {options.rounds}")
    if not 0 < options.seconds <= MAX_SECONDS:
        raise BenchError(f"--seconds must be above 0 and at most {MAX_SECONDS:.0f}, not {options.seconds:g}")
    queries = read_queries(options.queries)
    with tempfile.TemporaryDirectory(prefix="care-bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        url, cached_url = (options.url, None) if options.url else _own_services(options.collection, folder, stack)
        bench = Bench(url, queries, options.seconds, cached_url)
        say("bench: warming up")
        size = bench.warm_up()
        measured = bench.run(stack.enter_context(running(bare_server(size), folder)).url, options.rounds)
        facts |= {
            "versions": versions(),
            "collection": _collection(url),
            "settings": "those of the service at --url" if options.url else settings(os.environ | FORCED),
            "load": f"{options.rounds} rounds of {options.seconds:g} s per line; {len(queries)} queries, each time "
            f"with another number after it; top_k 10; typical answer {size} bytes",
        }
        return make_report(facts, measured)


def _own_services(collection: Path | None, folder: Path, stack: contextlib.ExitStack) -> tuple[str, str]:
    """Returns the addresses of the service without caches and of the one with; both end with the stack."""
    if collection is None:
        say("bench: building the snapshot of the example corpus")
        collection = build_example(folder / "collection")
    elif not (collection / "CURRENT").is_file():  # a service would wait for its first snapshot
        raise BenchError(f"{collection} has no published version; care index build … --publish makes one")
    plain = stack.enter_context(running(care_server(collection.resolve()), folder))
    caching = stack.enter_context(running(care_server(collection.resolve(), FORCED | CACHE), folder))
    return plain.url, caching.url


def _collection(url: str) -> str:
    status, body = get(url, "/v1/collection")
    if status != 200:
        raise BenchError(f"{url}/v1/collection answered {status}; is it a CARE service?")
    facts = json.loads(body)
    encoder = facts["encoder"]
    return (
        f"{facts['documents']} documents, {facts['passages']} passages, "
        f"encoder {encoder['architecture']} {encoder['variant']}, {encoder['dim']}-d"
    )


if __name__ == "__main__":
    exit_with(main)
