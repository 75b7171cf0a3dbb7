"""`make bench-keys`: what keys and traces cost a search, with and without, turn by turn.

  python -m loadtest.lab.keys                      the example corpus, services started for the run
  python -m loadtest.lab.keys --before FOLDER      beside the service of another checkout, without keys

Each service runs twice, without caches and with its process cache. In a round every service answers every scenario for
a moment while the others are stopped; every second round goes backwards. Ratios are those of neighbours in one round,
so other work on the machine meets both. A process is faster or slower than its equals for as long as it lives, so all
are started several times. With keys, a request carries a key that has a rate, as a Bearer token. With traces, all of
them are sent to a collector in this process as well.

Limits, by the median over the rounds of all starts: with keys, and with keys and traces, at most 5 % more processor
time a request than without; without keys at most 2 % more than before. Exit status 1 if one is missed or an answer
failed. Requests a second are shown beside it: on a shared machine they differ more between two runs of one service.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from loadtest.answers import read_queries
from loadtest.bench import CACHED, QUERIES, Scenario
from loadtest.harness import HOST, REPOSITORY, BenchError
from loadtest.harness.generator import MAX_SECONDS, Job, Measurement, measure
from loadtest.harness.machine import processor_seconds
from loadtest.harness.report import Program, Spread, exit_with, failures_text, markdown, publish, say, summary, table
from loadtest.harness.servers import CACHE, FORCED, Started, build_example, care, care_server, running

STARTS, ROUNDS, SECONDS = 4, 4, 1.0
SCENARIOS = (Scenario(CACHED, 1), Scenario("lexical", 1), Scenario("hybrid", 1), Scenario("hybrid", 8))
MOST_OF_KEYS, MOST_SINCE_BEFORE = 1.05, 1.02
SERVICES = WITHOUT, WITH, TRACED, BEFORE = "without keys", "with keys", "with keys and traces", "before"


@dataclass(frozen=True, slots=True)
class Service:
    """One way to run the service: without caches, and with; `key` goes with every request."""

    plain: Started
    cached: Started
    key: str = ""

    def of(self, scenario: Scenario) -> Started:
        return self.cached if scenario.mode == CACHED else self.plain


@dataclass(frozen=True, slots=True)
class Row:
    """A service in a scenario: requests a second, processor time of a request; ratios to the one without keys."""

    service: str
    scenario: Scenario
    requests_per_second: Spread
    ratio: Spread
    processor_us: Spread
    processor_ratio: Spread
    failures: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run."""

    facts: dict[str, str]
    rows: list[Row]

    def misses(self) -> list[str]:
        """The limits that were exceeded."""
        own = [row for row in self.rows if row.service in (WITH, TRACED)]
        slow = [row for row in own if row.processor_ratio.median > MOST_OF_KEYS]
        least = 1 / MOST_SINCE_BEFORE
        slow += [row for row in self.rows if row.service == BEFORE and row.processor_ratio.median < least]
        failed = [row for row in self.rows if row.failures]
        return [
            f"{row.scenario.mode}, {row.scenario.connections} connections: {row.service}" for row in (*slow, *failed)
        ]


Measured = dict[tuple[str, Scenario], list[Measurement]]


def measure_rounds(
    services: Mapping[str, Service], queries: Sequence[str], seconds: float, rounds: int, start: int, into: Measured
) -> None:
    """Measures services of one start in turn, and adds the rounds to `into`; the first one warms up."""
    for number in range(rounds + 1):
        say(f"keys: start {start + 1}, round {number} of {rounds}")
        names = list(services) if number % 2 else list(services)[::-1]
        for scenario in SCENARIOS:
            for name in names:
                found = _measure(services[name], scenario, queries, seconds, start * (rounds + 1) + number)
                if number:
                    into.setdefault((name, scenario), []).append(found)


def make_rows(measured: Measured) -> list[Row]:
    rows = []
    for (name, scenario), ones in measured.items():
        pairs = list(zip(ones, measured[WITHOUT, scenario], strict=True))
        speed, _, failures = summary(ones)
        rows.append(
            Row(
                name,
                scenario,
                speed,
                Spread.of([one.requests_per_second / other.requests_per_second for one, other in pairs]),
                Spread.of([_processor_us(one) for one in ones]),
                Spread.of([_processor_us(one) / _processor_us(other) for one, other in pairs]),
                failures,
            )
        )
    return sorted(rows, key=lambda row: (SCENARIOS.index(row.scenario), SERVICES.index(row.service)))


def _processor_us(one: Measurement) -> float:
    return one.processor_seconds / len(one.latency_ms) * 1e6


def _measure(service: Service, scenario: Scenario, queries: Sequence[str], seconds: float, number: int) -> Measurement:
    started, is_cached = service.of(scenario), scenario.mode == CACHED
    started.resume()
    try:
        mode = "hybrid" if is_cached else scenario.mode
        connections, numbered = scenario.connections, not is_cached
        # An older service may not time the stages of today.
        job = Job(started.url, queries, mode, connections, seconds, key=service.key, numbered=numbered, timings=False)
        # No query comes twice, but for the cache; all services get the same ones.
        job = replace(job, first_number=0 if is_cached else number * 1_000_000)
        before = processor_seconds(started.process.pid)
        found = measure(job)
        if not found.latency_ms:
            raise BenchError(f"no good answer: {failures_text(found.failures)}")
        return replace(found, processor_seconds=processor_seconds(started.process.pid) - before)
    finally:
        started.pause()


def as_markdown(report: Report) -> str:
    rows = [
        f"{row.scenario.mode} | {row.scenario.connections} | {row.service} | {row.requests_per_second:.0f} | "
        f"{row.ratio:.3f} | {row.processor_us:.0f} | {row.processor_ratio:.3f} | {failures_text(row.failures)}"
        for row in report.rows
    ]
    columns = "mode | connections | service | requests/s | to without keys | processor µs a request | ratio | failures"
    return markdown(report.facts, table(columns, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("keys", "loadtest.lab.keys", __doc__)
    program.add_argument("--before", type=Path, help="folder of another checkout to measure beside")
    program.add_argument("--seconds", type=float, default=SECONDS, help="length of a measurement (%(default)s)")
    program.add_argument("--starts", type=int, default=STARTS, help="starts of every service (%(default)s)")
    program.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of a line in a start (%(default)s)")
    program.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return program.run(arguments, _run)


def _run(given: argparse.Namespace, facts: dict[str, str]) -> int:
    if min(given.starts, given.rounds) < 1 or not 0 < given.seconds <= MAX_SECONDS:
        raise BenchError(f"--starts and --rounds must be at least 1, --seconds above 0 and at most {MAX_SECONDS:.0f}")
    queries = read_queries(QUERIES)
    measured: Measured = {}
    with tempfile.TemporaryDirectory(prefix="care-keys-") as made:
        folder = Path(made)
        # The older one of two programs: it cannot read what the newer one writes.
        build_example(folder / "collection", code=given.before or REPOSITORY)
        path = folder / "keys.json"
        key = care("keys", "--file", path, "create", "bench", "--scope", "search", "--rate", "1000000/s").strip()
        for start in range(given.starts):
            with contextlib.ExitStack() as stack:
                services = _start(stack, folder, {"CARE_KEYS_FILE": str(path)}, key, given.before)
                measure_rounds(services, queries, given.seconds, given.rounds, start, measured)
    per_line = f"{given.starts} starts, {given.rounds} rounds of {given.seconds:g} s a line in each"
    facts["load"] = f"{per_line}; {len(queries)} queries; top_k 10"
    if given.before is not None:
        facts["before"] = str(given.before)
    report = Report(facts, make_rows(measured))
    publish(as_markdown(report), report, given.json)
    for miss in report.misses():
        say(f"keys: missed: {miss}")
    return 1 if report.misses() else 0


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """The address of a server that takes every trace and keeps none."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing is logged."""

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{HOST}:{server.server_port}"
        finally:
            server.shutdown()


def _start(
    stack: contextlib.ExitStack, folder: Path, keys: Mapping[str, str], key: str, before: Path | None
) -> dict[str, Service]:
    """Starts and pauses every service, each with and without its cache."""

    def start(own: Mapping[str, str], code: Path | None = None, key: str = "") -> Service:
        started = []
        for cache in ({}, CACHE):
            server = care_server(folder / "collection", {**FORCED, **cache, **own})
            if code is not None:
                server = replace(server, command=[server.command[0], str(code / "cli.py"), *server.command[2:]])
            started.append(stack.enter_context(running(server, folder)))
            started[-1].pause()
        return Service(started[0], started[1], key)

    traced = {**keys, "CARE_TRACES_URL": stack.enter_context(_collector())}
    services = {WITHOUT: start({}), WITH: start(keys, key=key), TRACED: start(traced, key=key)}
    return services if before is None else services | {BEFORE: start({}, before.resolve())}


if __name__ == "__main__":
    exit_with(main)
