"""`make bench-gpu`: measures searches per second of one machine with a GPU, and what limits them.

  python -m loadtest.lab.gpu                                     1M × 768, 12 × 768, 250k vocabulary, on cuda
  python -m loadtest.lab.gpu --documents 20000 --layers 2 --width 64 --vocabulary 5000 --device cpu    a dry run

- The encoder (`models.export.synthetic`) and the snapshot (`indexer.synthetic`) are random, made on the first call and
  kept in --folder. Search is exact, so the values do not change its time.
- `care serve` runs with an engine process that owns the device and --workers HTTP processes, caches off; other settings
  come from the environment. wrk on the same machine asks dense queries of 8–32 tokens in a closed loop.
- Batch is the mean number of queries in a batch; "engine busy" the share of the time in which the engine worked; "GPU
  busy" nvidia-smi's share of the time in which any kernel ran. Cores are processor seconds a second.
- The limit is an engine that is always busy, or workers that use all their cores, or else the number of connections.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import mean

from loadtest.harness import REPOSITORY, BenchError, positive, servers
from loadtest.harness.machine import command_lines, output, private_mb, processor_seconds, settings, versions
from loadtest.harness.report import Program, exit_with, failures_text, markdown, say, table, yes

TOKENS = (8, 32)
BODIES = 20_000
CONNECTIONS = (1, 8, 32, 64, 128, 256, 512, 1024)
SECONDS = 10
WARM_UP_SECONDS = 3
WORKERS = 12
# A GPU needs large batches; 1,024 connections may all be waiting.
SETTINGS = {"CARE_BATCH_QUERIES": "256", "CARE_BATCH_TOKENS": "8192", "CARE_QUEUE_LIMIT": "4096"}
METRICS = ("care_batch_size_sum", "care_batch_size_count", "care_engine_seconds_total")
METRIC = re.compile(rf"^({'|'.join(METRICS)}) (\S+)", re.MULTILINE)
# The goals: searches a second within a p99, and the median of one connection.
GOAL_PER_SECOND, GOAL_P99_MS, GOAL_ALONE_MS = 10_000, 25.0, 4.0

WRK_SCRIPT = REPOSITORY / "loadtest" / "search.lua"
WRK_THREADS = 4
# How much longer than the load wrk may take.
WRK_GRACE_SECONDS = 30.0
WRK_FAILURES = ("status", "connect", "read", "write", "timeout")
NVIDIA_SMI = "nvidia-smi"
GPU_SAMPLE_MS = 200


@dataclass(frozen=True, slots=True)
class Load:
    """What wrk measured. `requests` includes the failed ones; `processor_seconds` is wrk's own."""

    connections: int
    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    failures: dict[str, int]
    processor_seconds: float

    @property
    def searches_per_second(self) -> float:
        return (self.requests - self.failures.get("status", 0)) / self.seconds


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of the service at one moment, or their increase a second; cores are processor seconds."""

    queries: float
    batches: float
    engine_seconds: float
    engine_cores: float
    workers_cores: float

    @property
    def batch(self) -> float:
        """Queries in a batch."""
        return self.queries / self.batches if self.batches else 0.0

    def since(self, before: Reading, seconds: float) -> Reading:
        """Returns the increase a second."""
        return Reading(*((now - then) / seconds for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class Row:
    """One load, and what was used meanwhile; `gpu_busy` is the share of the time in which a kernel ran."""

    load: Load
    usage: Reading
    gpu_busy: float | None


class Service:
    """A running service: its counters and its processes."""

    def __init__(self, started: servers.Started) -> None:
        self.url = started.url
        commands = command_lines(started.process.pid)
        self._engine = [pid for pid, command in commands.items() if servers.ENGINE_COMMAND in command]
        self._workers = [pid for pid, command in commands.items() if servers.WORKER_COMMAND in command]

    def read(self) -> Reading:
        _, text = servers.get(self.url, "/metrics")
        found = {name: float(value) for name, value in METRIC.findall(text.decode())}
        engine, workers = (sum(map(processor_seconds, pids)) for pids in (self._engine, self._workers))
        if missing := [name for name in METRICS if name not in found]:
            raise BenchError(f"/metrics of the service has no {missing[0]}")
        queries, batches, seconds = (found[name] for name in METRICS)
        return Reading(queries, batches, seconds, engine, workers)

    def memory(self) -> str:
        engine = sum(map(private_mb, self._engine))
        workers = [private_mb(pid) for pid in self._workers]
        return f"{engine:.0f} MB of the engine's own, at most {max(workers, default=0):.0f} MB of a worker's own"


def write_bodies(file: Path, number: int, tokens: tuple[int, int]) -> None:
    """Writes search requests, one a line: random Chinese characters, one token each, [CLS] and [SEP] counted."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as written:
        for _ in range(number):
            query = "".join(chr(draw.randint(0x4E00, 0x9FA5)) for _ in range(draw.randint(*tokens) - 2))
            written.write(json.dumps({"query": query, "mode": "dense"}, ensure_ascii=False) + "\n")


def drive(wrk: str, url: str, bodies: Path, connections: int, seconds: int) -> Load:
    """Runs wrk once; a generator in Python would take several times its processor time on the measured machine."""
    found = shutil.which(wrk)
    if found is None:
        raise BenchError(f"{wrk} is not there; install Debian's package wrk, or give --wrk its path")
    options = ["-t", min(WRK_THREADS, connections), "-c", connections, "-d", f"{seconds}s", "--timeout", "10s"]
    command = [found, *map(str, options), "-s", str(WRK_SCRIPT), url, "--", str(bodies)]
    before = _children_seconds()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + WRK_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        raise BenchError(f"wrk did not end within {seconds + WRK_GRACE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise BenchError(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]}")
    return read_summary(done.stdout, connections, _children_seconds() - before)


def read_summary(printed: str, connections: int, processor_seconds: float) -> Load:
    """Reads the last line, which search.lua has wrk print."""
    try:
        found = json.loads(printed.strip().splitlines()[-1])
        failures = {name: found[name] for name in WRK_FAILURES if found[name]}
        times = (found["microseconds"] / 1e6, found["p50"] / 1000, found["p99"] / 1000)
        return Load(connections, found["requests"], *times, failures, processor_seconds)
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"wrk printed no summary: {printed.strip()[-200:]!r}") from error


def _children_seconds() -> float:
    """Processor time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def watch_gpu() -> Iterator[list[str]]:
    """Samples the GPU while the block runs; the list of nvidia-smi's lines is complete after it."""
    lines: list[str] = []
    query = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--loop-ms={GPU_SAMPLE_MS}")
    command = [NVIDIA_SMI, "--id=0", *query]
    if shutil.which(NVIDIA_SMI) is None:
        yield lines
        return
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield lines
        finally:
            process.terminate()
            # The samples of one load do not fill the pipe.
            lines += (process.communicate()[0] or "").splitlines()


def busy_share(lines: list[str]) -> float | None:
    """Returns the mean of per cents, one a line; None without any line."""
    samples = [float(line) for line in lines if line.strip()]
    return mean(samples) / 100 if samples else None


def gpu_name() -> str:
    """Returns the GPU and its driver."""
    found = output(NVIDIA_SMI, "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return found.replace(", ", ", driver ") or "none"


def measure(service: Service, wrk: str, bodies: Path, connections: int, seconds: int) -> Row:
    before = service.read()
    with watch_gpu() as samples:
        load = drive(wrk, service.url, bodies, connections, seconds)
    return Row(load, service.read().since(before, load.seconds), busy_share(samples))


def as_markdown(facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    columns = (
        "connections | searches/s | p50 ms | p99 ms | batch | engine busy | GPU busy | cores: engine | workers | wrk | "
        "failures"
    )
    lines = []
    for row in rows:
        load, usage = row.load, row.usage
        gpu, wrk = "–" if row.gpu_busy is None else f"{row.gpu_busy:.0%}", load.processor_seconds / load.seconds
        lines.append(
            f"{load.connections} | {load.searches_per_second:,.0f} | {load.p50_ms:.2f} | {load.p99_ms:.2f} | "
            f"{usage.batch:.1f} | {usage.engine_seconds:.0%} | {gpu} | {usage.engine_cores:.1f} | "
            f"{usage.workers_cores:.1f} | {wrk:.1f} | {failures_text(load.failures)}"
        )
    return markdown(facts, table(columns, lines), *_goals(rows), "")


def _goals(rows: Sequence[Row]) -> Iterator[str]:
    quick = [row.load for row in rows if row.load.p99_ms <= GOAL_P99_MS and not row.load.failures]
    best = max(quick, key=lambda load: load.searches_per_second, default=None)
    most = 0.0 if best is None else best.searches_per_second
    where = "no line" if best is None else f"{most:,.0f} at {best.connections} connections"
    met = f"(at least {GOAL_PER_SECOND:,}: {yes(most >= GOAL_PER_SECOND)})"
    yield f"- most searches/s with a p99 of at most {GOAL_P99_MS:.0f} ms: {where} {met}"
    for load in (row.load for row in rows if row.load.connections == 1):
        met = f"(at most {GOAL_ALONE_MS:.0f}: {yes(load.p50_ms <= GOAL_ALONE_MS)})"
        yield f"- p50 of one connection: {load.p50_ms:.2f} ms {met}"


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("bench-gpu", "loadtest.lab.gpu", __doc__)
    program.add_argument("--documents", type=positive, default=1_000_000, help="(%(default)s)")
    program.add_argument("--layers", type=positive, default=12, help="of the encoder (%(default)s)")
    program.add_argument("--width", type=positive, default=768, help="of the encoder and the vectors (%(default)s)")
    program.add_argument("--vocabulary", type=positive, default=250_000, help="of the encoder (%(default)s)")
    program.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    program.add_argument("--workers", type=positive, default=WORKERS, help="HTTP processes (%(default)s)")
    program.add_argument("--connections", type=positive, nargs="+", default=CONNECTIONS, help="a line each")
    program.add_argument("--seconds", type=positive, default=SECONDS, help="length of a line (%(default)s)")
    program.add_argument("--folder", type=Path, default=Path("var/gpu"), help="keeps what is made once (%(default)s)")
    program.add_argument("--wrk", default="wrk", help="the load generator's command (%(default)s)")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    encoder, collection = prepare(options)
    environment = {name: os.environ.get(name, value) for name, value in SETTINGS.items()} | servers.FORCED
    environment |= {"CARE_ENGINE": "process", "CARE_ENCODER": str(encoder)}
    server = servers.care_server(collection, environment, "--device", options.device, "--workers", str(options.workers))
    with tempfile.TemporaryDirectory(prefix="care-bench-gpu-") as made, servers.running(server, Path(made)) as started:
        bodies = Path(made) / "bodies.jsonl"
        write_bodies(bodies, BODIES, TOKENS)
        service = Service(started)
        say("bench-gpu: warming up")
        drive(options.wrk, service.url, bodies, max(options.connections), WARM_UP_SECONDS)
        rows = []
        for connections in options.connections:
            say(f"bench-gpu: {connections} connections")
            rows.append(measure(service, options.wrk, bodies, connections, options.seconds))
        memory = service.memory()
    facts |= {
        "machine": f"{facts['machine']}; GPU: {gpu_name()}",
        "versions": versions(),
        "snapshot": f"{options.documents:,} × {options.width} random unit vectors, exact search",
        "encoder": f"BERT {options.layers} × {options.width}, vocabulary {options.vocabulary:,}, random weights",
        "settings": f"{settings(environment)}, {options.workers} workers",
        "memory": memory,
        "load": f"wrk, {options.seconds} s a line; dense, top 10, queries of {TOKENS[0]}–{TOKENS[1]} tokens",
    }
    print(as_markdown(facts, rows))
    return 1 if any(row.load.failures for row in rows) else 0


def prepare(options: argparse.Namespace) -> tuple[Path, Path]:
    """Returns the folders of the encoder and the collection, which are made if they are missing."""
    folder: Path = options.folder.resolve()
    encoder = folder / f"encoder-{options.layers}x{options.width}-{options.vocabulary}-{options.device}"
    if not encoder.exists():
        say("bench-gpu: making the encoder (once)")
        # A GPU computes in fp16; a CPU, for the dry run only, in fp32, which needs no calibration.
        variant = "fp16" if options.device == "cuda" else "fp32"
        shape = ("--layers", options.layers, "--width", options.width, "--vocabulary", options.vocabulary)
        servers.run_command(sys.executable, "-m", "models.export.synthetic", encoder, *shape, "--variant", variant)
    collection = folder / f"collection-{options.documents}x{options.width}"
    if not (collection / "CURRENT").exists():
        say("bench-gpu: making the snapshot (once)")
        size = ("--encoder", encoder, "--documents", options.documents)
        servers.run_command(sys.executable, "-m", "indexer.synthetic", collection, *size)
    return encoder, collection


if __name__ == "__main__":
    exit_with(main)
