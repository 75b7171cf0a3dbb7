"""`make bench-keys`: measures what keys, rate limits and traces cost a search.

  python -m loadtest.lab.keys                                        without keys, with keys, with keys and traces
  python -m loadtest.lab.keys --before FOLDER --hits --starts 20     without keys, here and in another checkout

One process serves all ways (`loadtest.lab.ways`); two checkouts need a process each, and so more starts. Turns have a
fixed number of equal requests and last a tenth of a second. The ways take turns, every second round goes backwards, and
a ratio is that of neighbours in one round. The figure of a start is the median of its rounds. The table has the median
of the starts and a 95 % interval of it, which assumes no distribution: with 6 starts, all of them.
With keys, a request carries a key that has a rate. With traces, all requests are sent to a collector in this process.

Processor time of a hit is that of the event loop's thread. Spans are written by another thread, after the turn. Its
time is measured over some seconds of hits, less that of the same hits without traces, and added to the traced hit.

Limits, by the median: with keys, and with keys and traces, at most 5 % more processor time a request than without;
without keys at most 2 % more than before. Exit status 1 if one is missed or an answer failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import comb
from pathlib import Path
from statistics import median

from loadtest.answers import read_queries
from loadtest.bench import CACHED
from loadtest.harness import HOST, QUERIES, REPOSITORY, BenchError, positive
from loadtest.harness.generator import MAX_SECONDS, Job, drive
from loadtest.harness.machine import main_thread_seconds, processor_seconds
from loadtest.harness.report import Program, Spread, exit_with, failures_text, markdown, publish, say, table
from loadtest.harness.servers import CACHE, FORCED, build_example, care, care_server, free_port, running

STARTS, ROUNDS = 6, 12
# The requests of a turn.
MODES = {CACHED: 300, "lexical": 50, "hybrid": 10}
# Hits for the time of the thread that writes spans, and until it has sent the last of them.
SPANS, SENDING_SECONDS = 4000, 1.2
MOST_OF_KEYS, MOST_SINCE_BEFORE = 1.05, 1.02
WAYS = WITHOUT, WITH, TRACED, BEFORE = "without keys", "with keys", "with keys and traces", "before"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to serve: its address, its process, and the key that goes with every request."""

    url: str
    pid: int
    key: str = ""

    def turn(self, mode: str, queries: Sequence[str], requests: int, first: int = 0) -> Turn:
        """Sends that number of requests. Queries but hits are numbered from `first`, so that none comes twice."""
        is_hit = mode == CACHED
        clock = main_thread_seconds if is_hit else processor_seconds
        # An older service may not time the stages of today.
        job = Job(self.url, queries, "hybrid" if is_hit else mode, 1, MAX_SECONDS, first, requests, timings=False)
        before = clock(self.pid)
        found = drive(replace(job, numbered=not is_hit, key=self.key))
        if found.failures or len(found.latency_ms) != requests:
            raise BenchError(f"{len(found.latency_ms)} of {requests} answers: {failures_text(found.failures)}")
        return Turn(found.requests_per_second, (clock(self.pid) - before) / requests * 1e6)

    def other_threads_us(self, queries: Sequence[str]) -> float:
        """Processor time of all threads but the event loop's, of a hit."""
        before = processor_seconds(self.pid) - main_thread_seconds(self.pid)
        self.turn(CACHED, queries, SPANS)
        time.sleep(SENDING_SECONDS)
        return (processor_seconds(self.pid) - main_thread_seconds(self.pid) - before) / SPANS * 1e6


@dataclass(frozen=True, slots=True)
class Turn:
    """Speed, and processor time of a request."""

    per_second: float
    processor_us: float


Turns = dict[tuple[str, str], list[Turn]]
"""The turns of one start, by way and mode."""


@dataclass(frozen=True, slots=True)
class Row:
    """A way in a mode: requests a second, processor time of a request; ratios to the way without keys."""

    way: str
    mode: str
    per_second: Spread
    ratio: Spread
    processor_us: Spread
    processor_ratio: Spread

    @classmethod
    def of(cls, way: str, mode: str, starts: Sequence[Turns]) -> Row:
        speed, speeds, used, uses = [], [], [], []
        for start in starts:
            own = start[way, mode]
            pairs = list(zip(own, start[WITHOUT, mode], strict=True))
            speed.append(median(one.per_second for one in own))
            speeds.append(median(one.per_second / other.per_second for one, other in pairs))
            used.append(median(one.processor_us for one in own))
            uses.append(median(one.processor_us / other.processor_us for one, other in pairs))
        return cls(way, mode, *map(interval, (speed, speeds, used, uses)))

    @property
    def is_missed(self) -> bool:
        if self.way == BEFORE:
            return self.processor_ratio.median < 1 / MOST_SINCE_BEFORE
        return self.processor_ratio.median > MOST_OF_KEYS


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run."""

    facts: dict[str, str]
    rows: list[Row]


def interval(values: Sequence[float]) -> Spread:
    """Returns the median and its 95 % interval by ranks: the number of values below the median is binomial."""
    n = len(values)
    tails = [sum(comb(n, i) for i in range(k + 1)) / 2**n for k in range(1, n // 2)]
    cut = sum(2 * tail <= 0.05 for tail in tails)
    return Spread.of(sorted(values)[cut : n - cut])


def measure(ways: Mapping[str, Way], queries: Sequence[str], rounds: int, modes: Mapping[str, int] = MODES) -> Turns:
    """Measures the ways of one start in turn; the first round warms up."""
    turns: Turns = {}
    for mode, requests in modes.items():
        for number in range(rounds + 1):
            for name in list(ways) if number % 2 else list(ways)[::-1]:
                found = ways[name].turn(mode, queries, requests, number * requests)
                if number:
                    turns.setdefault((name, mode), []).append(found)
    if TRACED in ways:
        spans_us = ways[TRACED].other_threads_us(queries) - ways[WITHOUT].other_threads_us(queries)
        hits = turns[TRACED, CACHED]
        turns[TRACED, CACHED] = [replace(turn, processor_us=turn.processor_us + spans_us) for turn in hits]
    return turns


def as_markdown(report: Report) -> str:
    rows = [
        f"{row.mode} | {row.way} | {row.per_second:.0f} | {row.ratio:.3f} | "
        f"{row.processor_us:.0f} | {row.processor_ratio:.3f}"
        for row in report.rows
    ]
    columns = "mode | service | requests/s | to without keys | processor µs a request | ratio"
    return markdown(report.facts, table(columns, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("keys", "loadtest.lab.keys", __doc__)
    program.add_argument("--before", type=Path, help="folder of another checkout, to be measured instead of keys")
    program.add_argument("--starts", type=positive, default=STARTS, help="starts of every process (%(default)s)")
    program.add_argument("--rounds", type=positive, default=ROUNDS, help="turns of a way and mode (%(default)s)")
    program.add_argument("--hits", action="store_true", help="measure hits in the process cache alone")
    program.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    queries, starts = read_queries(QUERIES), []
    modes = {CACHED: MODES[CACHED]} if options.hits else MODES
    with tempfile.TemporaryDirectory(prefix="care-keys-") as made:
        folder = Path(made)
        # The older one of two programs: it cannot read what the newer one writes.
        build_example(folder / "collection", code=options.before or REPOSITORY)
        for number in range(options.starts):
            say(f"keys: start {number + 1} of {options.starts}")
            with _started(folder, options.before) as ways:
                starts.append(measure(ways, queries, options.rounds, modes))
    facts["load"] = f"{options.starts} starts, {options.rounds} rounds in each; {len(queries)} queries; top_k 10"
    if options.before is not None:
        facts["before"] = str(options.before)
    rows = [Row.of(way, mode, starts) for mode in modes for way in WAYS if (way, mode) in starts[0]]
    report = Report(facts, rows)
    publish(as_markdown(report), report, options.json)
    missed = [row for row in rows if row.is_missed]
    for row in missed:
        say(f"keys: missed: {row.mode}, {row.way}")
    return 1 if missed else 0


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Yields the address of a server that takes every trace and keeps none."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Logs nothing."""

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{HOST}:{server.server_port}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def _started(folder: Path, before: Path | None) -> Iterator[dict[str, Way]]:
    """Serves the collection of the folder in all ways."""
    path = folder / "keys.json"
    path.unlink(missing_ok=True)
    key = care("keys", "--file", path, "create", "bench", "--scope", "search", "--rate", "1000000/s").strip()
    with contextlib.ExitStack() as stack:
        keys = {"keys_file": str(path)}
        traced = keys | {"traces_url": stack.enter_context(_collector())}
        if before is None:
            own = _serve(stack, folder, REPOSITORY, {}, keys, traced)
            yield {WITHOUT: own[0], WITH: replace(own[1], key=key), TRACED: replace(own[2], key=key)}
        else:  # each alone: a process that serves in more ways has more to do
            checkouts = {WITHOUT: REPOSITORY, BEFORE: before.resolve()}
            yield {name: _serve(stack, folder, code, {})[0] for name, code in checkouts.items()}


def _serve(stack: contextlib.ExitStack, folder: Path, code: Path, *settings: Mapping[str, str]) -> list[Way]:
    """Starts one process of a checkout with a port for each of the settings."""
    server = care_server(folder / "collection", {**FORCED, **CACHE, "PYTHONPATH": str(code)})
    ports = [free_port() for _ in settings[1:]] + [server.port]
    settings_json = [json.dumps({**own, "port": port}) for own, port in zip(settings, ports, strict=True)]
    # By its path, so that another checkout, which may lack it, can run it; without the folder of that path (-P).
    server = replace(server, command=[sys.executable, "-P", str(Path(__file__).with_name("ways.py")), *settings_json])
    pid = stack.enter_context(running(server, folder)).process.pid
    return [Way(f"http://{HOST}:{port}", pid) for port in ports]


if __name__ == "__main__":
    exit_with(main)
