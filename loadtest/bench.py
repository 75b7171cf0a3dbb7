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
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from loadtest import bench_facts
from loadtest.bench_processes import FORCED, bare, build_example, get, service
from loadtest.bench_report import BARE, Report, Scenario, as_json, as_markdown, make_report
from loadtest.client import MAX_SECONDS, REPOSITORY, BenchError, Job, Measurement, measure

QUERIES = REPOSITORY / "examples" / "queries.jsonl"
ROUNDS = 5
SECONDS = 2.0
WARM_UP_SECONDS = 1.0
# One round, in its order: each ratio's two sides are neighbours.
SCENARIOS = (
    Scenario("dense", 1),
    Scenario("lexical", 1),
    Scenario("hybrid", 1),
    Scenario(BARE, 1),
    Scenario("hybrid", 8),
    Scenario(BARE, 8),
    Scenario("hybrid", 32),
    Scenario(BARE, 32),
)
TYPICAL = Scenario("hybrid", 1)


class Bench:
    """The rounds of one run; the service is at `service_url`."""

    def __init__(self, service_url: str, queries: Sequence[str], seconds: float) -> None:
        self._service_url = service_url
        self._queries = queries
        self._seconds = seconds
        self._sent = 0

    def warm_up(self) -> int:
        """Asks the service in every way that will be measured; the size of a typical answer in bytes."""
        size = 0
        for scenario in SCENARIOS:
            if scenario.mode != BARE:
                measured = self._measure(scenario, self._service_url, min(self._seconds, WARM_UP_SECONDS))
                size = round(median(measured.body_bytes)) if scenario == TYPICAL else size
        return size

    def run(self, bare_url: str, rounds: int) -> dict[Scenario, list[Measurement]]:
        """Every scenario's measurements, in the order of the rounds."""
        self._measure(Scenario(BARE, 1), bare_url, min(self._seconds, WARM_UP_SECONDS))
        measured: dict[Scenario, list[Measurement]] = {scenario: [] for scenario in SCENARIOS}
        for number in range(rounds):
            _say(f"round {number + 1} of {rounds}")
            for scenario in SCENARIOS if number % 2 == 0 else reversed(SCENARIOS):
                url = bare_url if scenario.mode == BARE else self._service_url
                measured[scenario].append(self._measure(scenario, url, self._seconds))
        return measured

    def _measure(self, scenario: Scenario, url: str, seconds: float) -> Measurement:
        is_bare = scenario.mode == BARE
        job = Job(
            url=url,
            queries=self._queries,
            # The bare framework is sent what the service is sent.
            mode=TYPICAL.mode if is_bare else scenario.mode,
            connections=scenario.connections,
            seconds=seconds,
            first_number=self._sent,
            timings=not is_bare,
        )
        measured = measure(job)
        self._sent += measured.sent
        if not measured.latency_ms:
            reasons = ", ".join(measured.failures)
            raise BenchError(f"{scenario.mode}, {scenario.connections} connections: no good answer ({reasons})")
        return measured


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
        url = given.url or stack.enter_context(_own_service(given.collection, folder))
        bench = Bench(url, queries, given.seconds)
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


@contextlib.contextmanager
def _own_service(collection: Path | None, folder: Path) -> Iterator[str]:
    if collection is None:
        _say("building the snapshot of the example corpus")
        collection = folder / "collection"
        build_example(collection)
    with service(collection.resolve(), folder) as url:
        yield url


def read_queries(file: Path) -> list[str]:
    """The texts of a file of JSON lines."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [str(json.loads(line)["text"]) for line in lines if line.strip()]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BenchError(f'{file}: give JSON lines like {{"text": "…"}} ({type(error).__name__}: {error})') from error


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
