"""wrk, a compiled load generator, asking for searches: closed loop, so many connections for so many seconds.

It takes a fraction of the processor time that a generator in Python takes, which decides where the service answers
thousands of searches a second on the same machine. Debian packages it.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.harness.client import REPOSITORY
from loadtest.harness.errors import BenchError

SCRIPT = REPOSITORY / "loadtest" / "search.lua"
THREADS = 4
# How much longer than the load the command may take before something is wrong.
GRACE_SECONDS = 30.0
FAILURES = ("status", "connect", "read", "write", "timeout")


@dataclass(frozen=True, slots=True)
class Load:
    """What wrk saw. `requests` holds the failed ones too; `processor_seconds` is what wrk itself used."""

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


def write_bodies(file: Path, number: int, tokens: tuple[int, int]) -> None:
    """So many search requests, one a line: random Chinese characters, one token each, [CLS] and [SEP] counted."""
    randomly = random.Random(0)
    with file.open("w", encoding="utf-8") as written:
        for query in _queries(randomly, number, tokens):
            written.write(json.dumps({"query": query, "mode": "dense"}, ensure_ascii=False) + "\n")


def _queries(randomly: random.Random, number: int, tokens: tuple[int, int]) -> Iterator[str]:
    for _ in range(number):
        length = randomly.randint(*tokens) - 2
        yield "".join(chr(randomly.randint(0x4E00, 0x9FA5)) for _ in range(length))


def drive(wrk: str, url: str, bodies: Path, connections: int, seconds: int) -> Load:
    """One load; `wrk` is the command's name or path."""
    found = shutil.which(wrk)
    if found is None:
        raise BenchError(f"{wrk} is not there; install Debian's package wrk, or give --wrk its path")
    threads = min(THREADS, connections)
    options = ["-t", str(threads), "-c", str(connections), "-d", f"{seconds}s", "--timeout", "10s"]
    command = [found, *options, "-s", str(SCRIPT), url, "--", str(bodies)]
    before = _children_seconds()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        raise BenchError(f"wrk did not end within {seconds + GRACE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise BenchError(f"wrk ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-200:]}")
    return read_summary(done.stdout, connections, _children_seconds() - before)


def read_summary(printed: str, connections: int, processor_seconds: float) -> Load:
    """The last line of what search.lua had wrk print."""
    try:
        found = json.loads(printed.strip().splitlines()[-1])
        return Load(
            connections,
            found["requests"],
            found["microseconds"] / 1e6,
            found["p50"] / 1000,
            found["p99"] / 1000,
            {name: found[name] for name in FAILURES if found[name]},
            processor_seconds,
        )
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"wrk printed no summary: {printed.strip()[-200:]!r}") from error


def _children_seconds() -> float:
    """Processor time of the commands that were run from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
