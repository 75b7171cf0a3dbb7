"""`make bench-peers`: ours beside txtai's API and Infinity with FAISS, on one corpus, one set of weights, one load.

  python -m loadtest.lab.peers --data ../shared/data/eval/cmirb --weights ../shared/weights/bge-small-zh-v1.5

What runs
- The same weights everywhere: ours exported to int8 (what a CPU serves by default) and to fp32, the peers' in torch,
  fp32. The same document vectors, one per document, encoded once. Dense search, top 10, no cache.
- Each is a server of one process; all of them and the client are held to the same two cores. The peers run twice,
  with torch's own choice of two threads and with one; ours has its default. A peer that is not being measured is
  paused, so that its polling takes nothing from the others.
- txtai answers ids and scores from the FAISS index that it chooses for itself, by its API on uvicorn with uvloop and
  httptools. Infinity's engine runs inside a bare server that searches our own FAISS file in memory: no second HTTP hop
  and no vectors as JSON. All answer ids and scores; "whole hits" is ours with title, snippet, highlights and metadata,
  its default.

How to read the output
- A round measures every contestant at each number of connections, one right after another; every second round goes
  backwards. Requests per second are medians over the rounds with (lowest–highest); a ratio is made within a round.
- Latency is the client's, over all requests of all rounds. The processor time is what the server used for each
  answer, all its threads together: what it costs, however busy the machine was with other things.
- The last table says how far the rankings agree with ours in fp32: the contestants do the same work, or the ratio
  means nothing.
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
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from loadtest.harness import facts as bench_facts
from loadtest.harness.client import Job, measure
from loadtest.harness.errors import BenchError
from loadtest.harness.footprint import processor_seconds
from loadtest.harness.processes import Started, running
from loadtest.lab.peers_contestants import Contestant, ask, contestants, missing_environments, versions
from loadtest.lab.peers_prepare import prepare
from loadtest.lab.peers_report import Agreement, Turn, agreement, as_markdown, make_report

CORES = 2
CONNECTIONS = (1, 8, 32)
ROUNDS = 5
SECONDS = 3.0
WARM_UP_SECONDS = 2.0
COMPARED_QUERIES = 100
REFERENCE = "CARE fp32"


class Contest:
    """Contestants that run, all peers paused but the one that is asked."""

    def __init__(self, started: Sequence[tuple[Contestant, Started]], queries: Sequence[str], seconds: float) -> None:
        self._started = started
        self._queries = queries
        self._seconds = seconds
        self._sent = 0
        for contestant, server in started:
            if not contestant.own:
                server.pause()

    def agreements(self) -> list[Agreement]:
        """Rankings of the first queries, compared with the reference's."""
        step = max(1, len(self._queries) // COMPARED_QUERIES)
        queries = self._queries[::step][:COMPARED_QUERIES]
        rankings = {}
        for contestant, server in self._started:
            with self._awake(contestant, server):
                rankings[contestant.name] = [ask(server.url, contestant.form, query) for query in queries]
        return [agreement(name, given, rankings[REFERENCE]) for name, given in rankings.items()]

    def warm_up(self) -> None:
        for contestant, server in self._started:
            for connections in CONNECTIONS:
                self._measure(contestant, server, connections, WARM_UP_SECONDS)

    def run(self, rounds: int) -> dict[tuple[str, int], list[Turn]]:
        """Turns by name and connections, in the order of the rounds."""
        plan = [(*pair, connections) for connections in CONNECTIONS for pair in self._started]
        measured: dict[tuple[str, int], list[Turn]] = {
            (contestant.name, connections): [] for contestant, _, connections in plan
        }
        for number in range(rounds):
            _say(f"round {number + 1} of {rounds}")
            for contestant, server, connections in plan if number % 2 == 0 else reversed(plan):
                one = self._measure(contestant, server, connections, self._seconds)
                measured[contestant.name, connections].append(one)
        return measured

    def _measure(self, contestant: Contestant, server: Started, connections: int, seconds: float) -> Turn:
        job = Job(
            url=server.url,
            queries=self._queries,
            mode="dense",
            connections=connections,
            seconds=seconds,
            first_number=self._sent,
            timings=False,
            form=contestant.form,
        )
        with self._awake(contestant, server):
            before = processor_seconds(server.process.pid)
            measured = measure(job)
            used = processor_seconds(server.process.pid) - before
        self._sent += measured.sent
        if not measured.latency_ms:
            raise BenchError(f"{contestant.name}: no good answer ({', '.join(measured.failures)})")
        return Turn(measured, used)

    @contextlib.contextmanager
    def _awake(self, contestant: Contestant, server: Started) -> Iterator[None]:
        if contestant.own:
            yield
            return
        server.resume()
        yield
        server.pause()


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "loadtest.lab.peers", *(sys.argv[1:] if arguments is None else arguments)])
    try:
        return _bench(given, command)
    except BenchError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest.lab.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with corpus.jsonl.gz and */queries.jsonl")
    parser.add_argument("--weights", type=Path, required=True, help="transformers folder of a BERT with CLS pooling")
    parser.add_argument("--folder", type=Path, default=Path("var/peers"), help="keeps what is made once (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a measurement (%(default)s)")
    parser.add_argument("--documents", type=int, help="index only the first documents of the corpus (default: all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each line (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


def _bench(given: argparse.Namespace, command: str) -> int:
    for python in missing_environments():
        raise BenchError(f"{python} is missing; make bench-peers installs it")
    # Inherited by every process that is started from here on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    prepared = prepare(given.data, given.weights, given.folder.resolve(), given.documents)
    machine = bench_facts.machine()
    with tempfile.TemporaryDirectory(prefix="care-peers-") as made, contextlib.ExitStack() as stack:
        listed = contestants(prepared, Path(made))
        _say("starting the contestants")
        started = [(one, stack.enter_context(running(one.server, Path(made)))) for one in listed]
        contest = Contest(started, prepared.queries, given.seconds)
        agreements = contest.agreements()
        _say("warming up")
        contest.warm_up()
        measured = contest.run(given.rounds)
    facts = {
        "command": f"`{command}`",
        "commit": bench_facts.commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine,
        "versions": bench_facts.versions(),
        "peers": versions(),
        "load": f"{given.rounds} rounds of {given.seconds:g} s per line; {len(prepared.queries)} queries, each time "
        "with another number after it; dense, top 10",
    }
    report = make_report(facts, measured, [one.name for one in listed if one.own], agreements)
    print(as_markdown(report), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(report), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 1 if report.failures else 0


def _say(what: str) -> None:
    print(f"bench-peers: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # So that the processes started here are ended when this one is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
