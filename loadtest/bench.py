"""`make bench`: how fast `/v1/search` of the real service is, and how much of its time is its own.

  python -m loadtest.bench                        the example corpus, a service started for the run, caches off
  python -m loadtest.bench --collection FOLDER    another published collection
  python -m loadtest.bench --url http://127.0.0.1:8000    a service that runs already, with the settings it has

How to read the output
- Everything is from one run on one machine. A round measures every scenario once, the service right beside the bare
  framework, and every second round goes backwards, so that neither is always first.
- Requests per second and the ratio are medians over the rounds with (lowest–highest) after them. The ratio compares
  the two of the same round: the bare framework is FastAPI and uvicorn with the service's server settings, answering
  a constant as large as a typical answer. A wide spread means a busy machine: do not publish it.
- Medians and p99 of latencies and stages are over all requests of all rounds. Latency is the client's, from writing
  the request to the last byte of the answer; stages are the service's own `timings_ms`. `queue` holds the wait for
  the batch before and the way to the engine's thread and back; with many connections it is most of `total`.
- "Cache hit" is a second service with its process cache on, asked only what it answered before. Its first table
  has the time inside the server, `total`, with the limit beside it.
- The last table is for one connection: what each request took beyond its own encode + search + fetch. "Seen by the
  client" is the honest figure, for it has everything in it: client, loopback, framework, parsing, tokenising, threads.
  The bare framework's latency is the part that any service on this stack pays; "inside the server" is `total` less
  encode + search + fetch.
- The client takes a part of a core while it measures; on few cores it competes with the encoder, in both contestants.
- Failures are answers that are not 200, are malformed, lack `timings_ms` or never came. One of them and the exit
  status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from loadtest.answers import read_queries
from loadtest.bench_report import BARE, CACHED, Report, Scenario, as_json, as_markdown, make_report
from loadtest.harness import facts as bench_facts
from loadtest.harness.client import MAX_SECONDS, REPOSITORY, Job, Measurement, measure
from loadtest.harness.errors import BenchError
from loadtest.harness.processes import FORCED, bare, build_example, care_server, get, running

QUERIES = REPOSITORY / "examples" / "queries.jsonl"
ROUNDS = 5
SECONDS = 2.0
WARM_UP_SECONDS = 1.0
# One round, in its order: each ratio's two sides are neighbours.
SCENARIOS = (
    Scenario("dense", 1),
    Scenario("lexical", 1),
    Scenario(CACHED, 1),
    Scenario("hybrid", 1),
    Scenario(BARE, 1),
    Scenario("hybrid", 8),
    Scenario(BARE, 8),
    Scenario("hybrid", 32),
    Scenario(BARE, 32),
)
TYPICAL = Scenario("hybrid", 1)
CACHE = {"CARE_LRU_MB": "64"}


class Bench:
    """The rounds of one run; the service is at `service_url`, the one that caches, if there is one, at `cached_url`."""

    def __init__(self, service_url: str, queries: Sequence[str], seconds: float, cached_url: str | None = None) -> None:
        self._urls = {CACHED: cached_url} if cached_url else {}
        self._service_url = service_url
        self._queries = queries
        self._seconds = seconds
        self._sent = 0
        self.scenarios = [scenario for scenario in SCENARIOS if cached_url or scenario.mode != CACHED]

    def warm_up(self) -> int:
        """Asks the service in every way that will be measured; the size of a typical answer in bytes."""
        size = 0
        for scenario in self.scenarios:
            if scenario.mode == CACHED:
                self._fill_cache()
            elif scenario.mode != BARE:
                measured = self._measure(scenario, min(self._seconds, WARM_UP_SECONDS))
                size = round(median(measured.body_bytes)) if scenario == TYPICAL else size
        return size

    def run(self, bare_url: str, rounds: int) -> dict[Scenario, list[Measurement]]:
        """Every scenario's measurements, in the order of the rounds."""
        self._urls[BARE] = bare_url
        self._measure(Scenario(BARE, 1), min(self._seconds, WARM_UP_SECONDS))
        measured: dict[Scenario, list[Measurement]] = {scenario: [] for scenario in self.scenarios}
        for number in range(rounds):
            _say(f"round {number + 1} of {rounds}")
            for scenario in self.scenarios if number % 2 == 0 else reversed(self.scenarios):
                measured[scenario].append(self._measure(scenario, self._seconds))
        return measured

    def _fill_cache(self) -> None:
        """Every query once, however long it takes: what is measured later are hits only."""
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
        return Job(
            url=self._urls.get(scenario.mode, self._service_url),
            queries=self._queries,
            # The bare framework is sent what the service is sent.
            mode=TYPICAL.mode if scenario.mode in (BARE, CACHED) else scenario.mode,
            connections=scenario.connections,
            seconds=seconds,
            first_number=self._sent,
            timings=scenario.mode != BARE,
            numbered=scenario.mode != CACHED,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "loadtest.bench", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        report = _bench(given, command)
        print(as_markdown(report), flush=True)  # first of all: the file may not be writable
        if given.json is not None:
            _write_json(report, given.json)
    except BenchError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if report.failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a service that runs already, at http://127.0.0.1:PORT")
    where.add_argument(
        "--collection", type=Path, help="a published collection (default: the example corpus, built anew)"
    )
    parser.add_argument("--queries", type=Path, default=QUERIES, help="JSON lines with a text each (the example's)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a measurement (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each scenario (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _bench(given: argparse.Namespace, command: str) -> Report:
    if given.rounds < 1:
        raise BenchError(f"--rounds must be at least 1, not {given.rounds}")
    if not 0 < given.seconds <= MAX_SECONDS:
        raise BenchError(f"--seconds must be above 0 and at most {MAX_SECONDS:.0f}, not {given.seconds:g}")
    queries = read_queries(given.queries)
    machine = bench_facts.machine()  # before the run is a part of the load
    with tempfile.TemporaryDirectory(prefix="care-bench-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        url, cached_url = (given.url, None) if given.url else _own_services(given.collection, folder, stack)
        bench = Bench(url, queries, given.seconds, cached_url)
        _say("warming up")
        size = bench.warm_up()
        measured = bench.run(stack.enter_context(bare(size, folder)), given.rounds)
        facts = {
            "command": f"`{command}`",
            "commit": bench_facts.commit(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": machine,
            "versions": bench_facts.versions(),
            "collection": _collection(url),
            "settings": "those of the service at --url" if given.url else bench_facts.settings(os.environ | FORCED),
            "load": f"{given.rounds} rounds of {given.seconds:g} s per line; {len(queries)} queries, each time with "
            f"another number after it; top_k 10; typical answer {size} bytes",
        }
        return make_report(facts, measured)


def _own_services(collection: Path | None, folder: Path, stack: contextlib.ExitStack) -> tuple[str, str]:
    """The addresses of the service without caches and of the one with; both end with the stack."""
    if collection is None:
        _say("building the snapshot of the example corpus")
        collection = folder / "collection"
        build_example(collection)
    plain = stack.enter_context(running(care_server(collection.resolve()), folder))
    caching = stack.enter_context(running(care_server(collection.resolve(), FORCED | CACHE), folder))
    return plain.url, caching.url


def _write_json(report: Report, file: Path) -> None:
    try:
        file.write_text(json.dumps(as_json(report), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--json {file}: cannot be written ({error.strerror}); the figures are above") from error


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


def _say(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # So that the processes started here are ended when this one is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
