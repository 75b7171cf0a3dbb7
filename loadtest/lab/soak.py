"""`make soak`: runs a low load for half an hour; memory and open files must stay flat.

  python -m loadtest.lab.soak --minutes 30 [--per-second 20]

A service of two workers, an engine process, a small cache in each worker and a Redis answers queries at an even rate,
two thirds of them repeats. Between the minutes a document is posted, another version is served, and memory (private to
each process, of all together) and descriptors are read. Limits, over the second half: memory grows by at most 5 % an
hour by a straight line through it, descriptors by at most 16, no request fails. Exit status 1 if one is exceeded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

from loadtest.answers import read_queries
from loadtest.harness import QUERIES, BenchError, above_zero, positive, servers
from loadtest.harness.generator import MAX_SECONDS, Job, measure
from loadtest.harness.machine import descriptors, private_mb, process_tree
from loadtest.harness.report import Program, exit_with, failures_text, markdown, percentile, say, table
from loadtest.lab.faults import Corpus, administer, running_redis

CONNECTIONS = 16
MOST_GROWTH = 0.05  # of the memory, an hour
MOST_FILES = 16


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of load, and what the service held at its end."""

    sent: int
    failures: dict[str, int]
    refused: int
    p99_ms: float
    memory_mb: float
    files: int


def growth_per_hour(minutes: Sequence[Minute]) -> float:
    """Returns the share of its memory by which the service grows in an hour, by a line through the second half."""
    half = minutes[len(minutes) // 2 :]
    line = linear_regression(range(len(half)), [minute.memory_mb for minute in half])
    return line.slope * 60 / half[0].memory_mb


def misses(minutes: Sequence[Minute]) -> list[str]:
    """Returns the limits that were exceeded."""
    half, found = minutes[len(minutes) // 2 :], []
    if (growth := growth_per_hour(minutes)) > MOST_GROWTH:
        found.append(f"memory grows by {growth:.1%} an hour")
    if (more := half[-1].files - half[0].files) > MOST_FILES:
        found.append(f"{more} more open files")
    if failed := sum(sum(minute.failures.values()) for minute in minutes):
        found.append(f"{failed} failed requests")
    return found


def as_markdown(facts: dict[str, str], minutes: Sequence[Minute]) -> str:
    step = max(1, len(minutes) // 6)
    rows = [
        f"{number + 1} | {minute.sent} | {failures_text(minute.failures)} | {minute.refused} | {minute.p99_ms:.1f} | "
        f"{minute.memory_mb:.1f} | {minute.files}"
        for number, minute in enumerate(minutes)
        if number == 0 or (number + 1) % step == 0
    ]
    sent = sum(minute.sent for minute in minutes)
    summary = (
        f"{sent} requests. Memory over the second half: {growth_per_hour(minutes):+.1%} an hour. "
        f"Limits missed: {'; '.join(misses(minutes)) or 'none'}.\n"
    )
    columns = "minute | sent | failed | refused (429) | p99 ms | memory MB | open files"
    return markdown(facts, table(columns, rows), summary)


def run(minutes: int, per_second: float) -> list[Minute]:
    queries = read_queries(QUERIES)
    done: list[Minute] = []
    with tempfile.TemporaryDirectory(prefix="care-soak-") as made:
        folder = Path(made)
        corpus = Corpus.build(folder)
        with running_redis() as redis:
            settings = servers.FORCED | {"CARE_ENGINE": "process", "CARE_REDIS_URL": redis.connection_url}
            settings |= {"CARE_LRU_MB": "1"}  # full within minutes, or its filling would look like a leak
            server = servers.care_server(corpus.collection, settings, "--workers", "2")
            with servers.running(server, folder) as started:
                for number in range(minutes):
                    done.append(_minute(started, queries, per_second, number))
                    say(f"soak: minute {number + 1} of {minutes}: {done[-1]}")
                    _change(started.url, corpus, number)
    return done


def _minute(started: servers.Started, queries: Sequence[str], per_second: float, number: int) -> Minute:
    # Every third query has a number behind it, which no other has; the others repeat.
    mixed = [query if at % 3 else f"{query} {number}" for at, query in enumerate(queries)]
    job = Job(started.url, mixed, "hybrid", CONNECTIONS, MAX_SECONDS, numbered=False, per_second=per_second)
    found = measure(job)
    pid = started.process.pid
    memory_mb, files = sum(private_mb(one) for one in process_tree(pid)), descriptors(pid)
    p99_ms = percentile(found.latency_ms, 0.99) if found.latency_ms else 0.0
    return Minute(found.sent, found.failures, len(found.refused_ms), p99_ms, memory_mb, files)


def _change(url: str, corpus: Corpus, number: int) -> None:
    """Posts a document, always the same ten in turn, and serves the other version."""
    document = {"id": f"soak-{number % 10}", "text": f"第{number}分钟"}
    posted = administer(url, "/v1/documents", {"documents": [document]})
    versions = list(corpus.prefixes)
    rolled = administer(url, f"/admin/rollback?version={versions[number % 2]}")
    if (posted, rolled) != (200, 200):
        raise BenchError(f"a document was answered {posted}, a rollback {rolled}, instead of 200")


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("soak", "loadtest.lab.soak", __doc__)
    program.add_argument("--minutes", type=positive, default=30, help="at least 4 (%(default)s)")
    program.add_argument("--per-second", type=above_zero, default=20.0, help="requests a second (%(default)s)")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    if options.minutes < 4:
        raise BenchError("--minutes must be at least 4, or there is no second half to judge")
    minutes = run(options.minutes, options.per_second)
    facts["load"] = f"{options.per_second:g} requests/s, hybrid; a document posted and a version served every minute"
    print(as_markdown(facts, minutes))
    return 1 if misses(minutes) else 0


if __name__ == "__main__":
    exit_with(main)
