"""`make bench-gpu`: how many searches a second one machine with a graphics card answers, and what bounds it.

  python -m loadtest.lab.gpu                                     1M × 768, 12 × 768, 250k vocabulary, on cuda
  python -m loadtest.lab.gpu --documents 20000 --layers 2 --width 64 --vocabulary 5000 --device cpu    a dry run

What runs
- An encoder of that shape with random weights (`models.export.synthetic`) and a snapshot of random unit vectors
  (`indexer.synthetic`), both made on the first call and kept in --folder. Search is exact, so neither its time nor
  the encoder's depends on what the numbers are.
- `care serve` with an engine process that owns the device and --workers HTTP processes, caches off. Other settings
  come from the environment (`CARE_…`); those that matter here have defaults below.
- wrk on the same machine: closed loop, queries of 8–32 tokens, dense, top 10, everything an answer has by default.

How to read the output
- p50 and p99 are wrk's, over every request of the line. Batch is the mean number of queries in a batch of the engine;
  "engine busy" the share of the time in which it worked on one; "GPU busy" the mean of what nvidia-smi says (the share
  of the time in which any kernel ran). Cores are processor seconds a second: of the engine, of all workers, of wrk.
- What bounds it: an engine busy all the time is the bound itself; workers that use all of --workers cores are;
  otherwise it is the number of connections, which is the number of queries that can be waiting.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from loadtest.harness import facts as bench_facts
from loadtest.harness.client import REPOSITORY
from loadtest.harness.errors import BenchError
from loadtest.harness.footprint import command_lines, private_mb, processor_seconds
from loadtest.harness.processes import FORCED, Started, care_server, get, running
from loadtest.lab.gpu_report import Reading, Row, as_markdown
from loadtest.lab.gpu_usage import gpu_name, watch_gpu
from loadtest.lab.wrk import drive, write_bodies

TOKENS = (8, 32)
BODIES = 20_000
CONNECTIONS = (1, 8, 32, 64, 128, 256, 512, 1024)
SECONDS = 10
WARM_UP_SECONDS = 3
WORKERS = 12
# A card wants large batches; 1,024 connections may all be waiting.
SETTINGS = {"CARE_BATCH_QUERIES": "256", "CARE_BATCH_TOKENS": "8192", "CARE_QUEUE_LIMIT": "4096"}
ENGINE_COMMAND = "service.processes.engine"
WORKER_COMMAND = "service.processes.server"
METRIC = re.compile(r"^(care_batch_size_sum|care_batch_size_count|care_engine_seconds_total) (\S+)", re.MULTILINE)


class Service:
    """A service that runs, as seen from outside: its counters and its processes."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self.url = started.url
        words = command_lines(started.process.pid)
        self._engine = [pid for pid, command in words.items() if ENGINE_COMMAND in command]
        self._workers = [pid for pid, command in words.items() if WORKER_COMMAND in command]

    def read(self) -> Reading:
        _, text = get(self.url, "/metrics")
        found = {name: float(value) for name, value in METRIC.findall(text.decode())}
        engine, workers = (sum(map(processor_seconds, pids)) for pids in (self._engine, self._workers))
        try:
            return Reading(
                found["care_batch_size_sum"],
                found["care_batch_size_count"],
                found["care_engine_seconds_total"],
                engine,
                workers,
            )
        except KeyError as error:
            raise BenchError(f"/metrics of the service has no {error}") from None

    def memory(self) -> str:
        engine = sum(map(private_mb, self._engine))
        workers = [private_mb(pid) for pid in self._workers]
        return f"{engine:.0f} MB of the engine's own, at most {max(workers, default=0):.0f} MB of a worker's own"


def measure(service: Service, wrk: str, bodies: Path, connections: int, seconds: int) -> Row:
    before = service.read()
    with watch_gpu() as gpu:
        load = drive(wrk, service.url, bodies, connections, seconds)
    return Row(load, service.read().since(before, load.seconds), gpu.usage())


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "loadtest.lab.gpu", *(sys.argv[1:] if arguments is None else arguments)])
    settings = {name: os.environ.get(name, value) for name, value in SETTINGS.items()} | FORCED
    settings |= {"CARE_ENGINE": "process", "CARE_ENCODER": str(encoder_folder(given))}
    machine = f"{bench_facts.machine()}; card: {gpu_name()}"
    try:
        collection = prepare(given)
        server = care_server(collection, settings, "--device", given.device, "--workers", str(given.workers))
        with tempfile.TemporaryDirectory(prefix="care-bench-gpu-") as made, running(server, Path(made)) as started:
            bodies = Path(made) / "bodies.jsonl"
            write_bodies(bodies, BODIES, TOKENS)
            service = Service(started)
            _say("warming up")
            drive(given.wrk, service.url, bodies, max(given.connections), WARM_UP_SECONDS)
            rows = []
            for connections in given.connections:
                _say(f"{connections} connections")
                rows.append(measure(service, given.wrk, bodies, connections, given.seconds))
            memory = service.memory()
    except BenchError as error:
        _say(str(error))
        return 1
    facts = {
        "command": f"`{command}`",
        "commit": bench_facts.commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine,
        "versions": bench_facts.versions(),
        "snapshot": f"{given.documents:,} × {given.width} random unit vectors, exact search",
        "encoder": f"BERT {given.layers} × {given.width}, vocabulary {given.vocabulary:,}, random weights",
        "settings": f"{bench_facts.settings(settings)}, {given.workers} workers",
        "memory": memory,
        "load": f"wrk, {given.seconds} s a line; dense, top 10, queries of {TOKENS[0]}–{TOKENS[1]} tokens",
    }
    print(as_markdown(facts, rows))
    return 1 if any(row.load.failures for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadtest.lab.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=1_000_000, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="of the encoder (%(default)s)")
    parser.add_argument("--width", type=int, default=768, help="of the encoder and the vectors (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=250_000, help="of the encoder (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    parser.add_argument("--workers", type=int, default=WORKERS, help="HTTP processes (%(default)s)")
    parser.add_argument("--connections", type=int, nargs="+", default=CONNECTIONS, help="a line each (%(default)s)")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="length of a line (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("var/gpu"), help="keeps what is made once (%(default)s)")
    parser.add_argument("--wrk", default="wrk", help="the load generator's command (%(default)s)")
    return parser


def encoder_folder(given: argparse.Namespace) -> Path:
    shape = f"{given.layers}x{given.width}-{given.vocabulary}-{given.device}"
    folder: Path = given.folder.resolve() / f"encoder-{shape}"
    return folder


def prepare(given: argparse.Namespace) -> Path:
    """The encoder and the collection, made if they are not there; the collection's folder."""
    encoder = encoder_folder(given)
    if not encoder.exists():
        _say("making the encoder (once)")
        # A card computes in fp16; a processor, here for the dry run only, in fp32, which needs no calibration.
        variant = "fp16" if given.device == "cuda" else "fp32"
        shape = ("--layers", given.layers, "--width", given.width, "--vocabulary", given.vocabulary)
        _run("models.export.synthetic", encoder, *shape, "--variant", variant)
    collection: Path = given.folder.resolve() / f"collection-{given.documents}x{given.width}"
    if not (collection / "CURRENT").exists():
        _say("making the snapshot (once)")
        _run("indexer.synthetic", collection, "--encoder", encoder, "--documents", given.documents)
    return collection


def _run(module: str, *arguments: object) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"{module} failed: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}")


def _say(what: str) -> None:
    print(f"bench-gpu: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # So that the service is ended when this process is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
