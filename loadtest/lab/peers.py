"""`make bench-peers`: compares CARE with txtai's API and Infinity with FAISS: same corpus, weights and load.

  python -m loadtest.lab.peers --data ../shared/data/eval/cmirb --weights ../shared/weights/bge-small-zh-v1.5

- All get the same weights: ours exported to int8 and fp32, the peers' in torch, fp32; and the same document vectors.
  Dense search, top 10, no cache. All servers and the client share two cores; a peer that is not measured is paused.
- txtai searches the FAISS index of its own choice, by its API. Infinity's engine runs in a bare server that searches
  our FAISS file in memory. All answer ids and scores; "whole hits" is our default answer.
- A round measures every contestant at each number of connections; every second round goes backwards. Figures are
  medians over the rounds with (lowest–highest); a ratio is made within a round. Latencies are over all requests.
- The processor time is what the server used for each answer. The last table says how far the rankings agree with ours
  in fp32, or with the first of ours: only contestants that do the same work can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.harness import HOST, PATH, BenchError, above_zero, positive
from loadtest.harness.generator import TOP_K, Form, Job, Measurement, measure, write_requests
from loadtest.harness.machine import machine, processor_seconds, versions
from loadtest.harness.report import Program, exit_with, publish, say
from loadtest.harness.servers import Server, Started, care_server, connect, free_port, run_command, running
from loadtest.lab.peers_prepare import INFINITY, TXTAI, Prepared, prepare
from loadtest.lab.peers_report import ALONE, Agreement, agreement, as_markdown, make_report

CORES = 2
CONNECTIONS = (ALONE, 8, 32)
ROUNDS = 5
SECONDS = 3.0
WARM_UP_SECONDS = 2.0
COMPARED_QUERIES = 100
REFERENCE = "CARE fp32"
# The peers' threads, torch's own choice first, and our workers: the best choices for two cores.
THREADS, WORKERS = (2, 1), 2
VERSIONS = "import sys, importlib.metadata as m; print(', '.join(f'{name} {m.version(name)}' for name in sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A server and the form of its requests; `own` says that it is ours."""

    name: str
    server: Server
    form: Form
    own: bool


def contestants(prepared: Prepared, folder: Path, only: Sequence[str] = ()) -> list[Contestant]:
    """Ours, or `only` some of them, and the peers with every number of threads; `folder` takes a configuration file."""
    ours = [Contestant(f"CARE {variant}", _care(prepared, variant), Form.IDS, True) for variant in prepared.encoders]
    ours.append(Contestant("CARE int8, whole hits", _care(prepared, "int8", "-whole"), Form.CARE, True))
    for form, suffix in ((Form.IDS, ""), (Form.CARE, ", whole hits")):
        server = _care(prepared, "int8", f"-{WORKERS}-{form}", WORKERS)
        ours.append(Contestant(f"CARE int8, {WORKERS} workers{suffix}", server, form, True))
    if unknown := set(only) - {one.name for one in ours}:
        raise BenchError(f"--only {min(unknown)}: not one of {'; '.join(one.name for one in ours)}")
    ours = [one for one in ours if not only or one.name in only]
    peers = []
    for threads in THREADS:
        suffix = f"{threads} thread{'s' if threads > 1 else ''}"
        peers.append(Contestant(f"txtai, {suffix}", _txtai(prepared, folder, threads), Form.TXTAI, False))
        peers.append(Contestant(f"Infinity + FAISS, {suffix}", _infinity(prepared, threads), Form.IDS, False))
    return ours + peers


def ask(url: str, form: Form, query: str) -> list[str]:
    """Returns the ids of a contestant's hits, best first."""
    request = next(write_requests(Job(url, [query], "dense", 1, 1, numbered=False, form=form)))
    head, _, body = request.partition(b"\r\n\r\n")
    method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
    with connect(url) as connection:
        connection.request(method, path, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    if answer.status != 200:
        raise BenchError(f"{url}{PATH} answered {answer.status} to {query!r}; see its log")
    parsed = json.loads(content)
    hits = parsed if form is Form.TXTAI else parsed["results"][0]["hits"]
    ids = [str(hit["id"]) for hit in hits]
    if len(ids) != TOP_K:
        raise BenchError(f"{url} gave {len(ids)} hits, not {TOP_K}, to {query!r}")
    return ids


def _care(prepared: Prepared, variant: str, suffix: str = "", workers: int = 1) -> Server:
    plain = care_server(prepared.collection)
    own = {"CARE_ENCODER": str(prepared.encoders[variant]), "CARE_WORKERS": str(workers)}
    environment = {**plain.environment, **own}
    return Server(f"care-{variant}{suffix}", plain.command, plain.port, environment)


def _txtai(prepared: Prepared, folder: Path, threads: int) -> Server:
    config = folder / "txtai.yml"
    settings = {"path": str(prepared.txtai), "embeddings": {"path": str(prepared.weights)}}
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML too
    port = free_port()
    command = [str(TXTAI), "-m", "uvicorn", "txtai.api:app", "--host", HOST, "--port", str(port), "--no-access-log"]
    return Server(f"txtai-{threads}", command, port, {"CONFIG": str(config), **_environment(threads)}, ready="/count")


def _infinity(prepared: Prepared, threads: int) -> Server:
    port = free_port()
    files = (prepared.weights, prepared.vectors, prepared.index, prepared.ids)
    command = [str(INFINITY), "-m", "loadtest.lab.peers_programs", "infinity", *map(str, files), str(port)]
    return Server(f"infinity-{threads}", command, port, _environment(threads))


def _environment(threads: int) -> dict[str, str]:
    """Keeps the peers from asking a hub for files and from sending statistics."""
    offline = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
    return offline | {"OMP_NUM_THREADS": str(threads)}


def _peer_versions() -> str:
    """Returns the peers' libraries that matter for speed."""
    txtai = (TXTAI, "txtai", "torch", "transformers", "faiss-cpu", "uvicorn", "uvloop")
    infinity = (INFINITY, "infinity-emb", "torch", "transformers", "sentence-transformers", "faiss-cpu")
    return "; ".join(run_command(python, "-c", VERSIONS, *names).strip() for python, *names in (txtai, infinity))


class Contest:
    """The running contestants; all peers are paused but the one that is asked."""

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
        reference = rankings.get(REFERENCE) or rankings[self._started[0][0].name]
        return [agreement(name, options, reference) for name, options in rankings.items()]

    def warm_up(self) -> None:
        for contestant, server in self._started:
            for connections in CONNECTIONS:
                self._measure(contestant, server, connections, WARM_UP_SECONDS)

    def run(self, rounds: int) -> dict[tuple[str, int], list[Measurement]]:
        """Measurements by name and connections, in the order of the rounds."""
        plan = [(*pair, connections) for connections in CONNECTIONS for pair in self._started]
        measured: dict[tuple[str, int], list[Measurement]] = {
            (contestant.name, connections): [] for contestant, _, connections in plan
        }
        for number in range(rounds):
            say(f"bench-peers: round {number + 1} of {rounds}")
            for contestant, server, connections in plan if number % 2 == 0 else reversed(plan):
                one = self._measure(contestant, server, connections, self._seconds)
                measured[contestant.name, connections].append(one)
        return measured

    def _measure(self, contestant: Contestant, server: Started, connections: int, seconds: float) -> Measurement:
        number, form = self._sent, contestant.form
        job = Job(server.url, self._queries, "dense", connections, seconds, number, timings=False, form=form)
        with self._awake(contestant, server):
            before = processor_seconds(server.process.pid)
            measured = measure(job)
            used = processor_seconds(server.process.pid) - before
        self._sent += measured.sent
        if not measured.latency_ms:
            raise BenchError(f"{contestant.name}: no good answer ({', '.join(measured.failures)})")
        return replace(measured, processor_seconds=used)

    @contextlib.contextmanager
    def _awake(self, contestant: Contestant, server: Started) -> Iterator[None]:
        if contestant.own:
            yield
            return
        server.resume()
        yield
        server.pause()


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("bench-peers", "loadtest.lab.peers", __doc__)
    program.add_argument("--data", type=Path, required=True, help="folder with corpus.jsonl.gz and */queries.jsonl")
    program.add_argument("--weights", type=Path, required=True, help="transformers folder of a BERT with CLS pooling")
    program.add_argument("--folder", type=Path, default=Path("var/peers"), help="keeps what is made once (%(default)s)")
    program.add_argument("--seconds", type=above_zero, default=SECONDS, help="length of a measurement (%(default)s)")
    program.add_argument("--documents", type=positive, help="index only the first of the corpus (default: all)")
    program.add_argument("--only", nargs="+", default=[], metavar="NAME", help="of ours, as 'CARE int8' (default: all)")
    program.add_argument("--rounds", type=positive, default=ROUNDS, help="measurements of each line (%(default)s)")
    program.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    for python in (TXTAI, INFINITY):
        if not python.exists():
            raise BenchError(f"{python} is missing; make bench-peers installs it")
    # Inherited by every process that is started from here on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    prepared = prepare(options.data, options.weights, options.folder.resolve(), options.documents)
    facts["machine"] = machine()  # with the cores that are used
    with tempfile.TemporaryDirectory(prefix="care-peers-") as made, contextlib.ExitStack() as stack:
        listed = contestants(prepared, Path(made), options.only)
        say("bench-peers: starting the contestants")
        started = [(one, stack.enter_context(running(one.server, Path(made)))) for one in listed]
        contest = Contest(started, prepared.queries, options.seconds)
        agreements = contest.agreements()
        say("bench-peers: warming up")
        contest.warm_up()
        measured = contest.run(options.rounds)
    facts |= {
        "versions": versions(),
        "peers": _peer_versions(),
        "load": f"{options.rounds} rounds of {options.seconds:g} s per line; {len(prepared.queries)} queries, each "
        "time with another number after it; dense, top 10",
    }
    report = make_report(facts, measured, [one.name for one in listed if one.own], agreements)
    publish(as_markdown(report), report, options.json)
    return 1 if report.failures else 0


if __name__ == "__main__":
    exit_with(main)
