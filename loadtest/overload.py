"""`make overload`: ten times what the service can answer, for half a minute. Does it stay quick for those it accepts?

  python -m loadtest.overload                     the example corpus, a service started for the run, caches off
  python -m loadtest.overload --cached            its process cache on: no query comes twice, so it only gets in the way

What is measured, in this order
- unloaded: one connection, one request after another; its p99 is the yardstick.
- capacity: 8 connections, one request after another each, which fills the batches; the answers per second.
- overload: ten times the capacity, offered at even intervals whatever the service does (`loadtest/open_loop.py`).
  Every answer must be a search or a refusal with 429 and Retry-After. The p99 of the accepted ones should stay within
  twice the unloaded p99 plus the median batch under load (encode + search as the service timed it).
- memory: resident megabytes of the service before, highest during, and after the overload.
- recovery: from the end of the load on, one request after another; how long until ten in a row are answered, each
  within twice the unloaded p99.

The generator takes a part of the cores that the service computes on; how late it wrote its requests is reported with
them. Exit status 1 if anything but searches and refusals came back, or if the service did not recover.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

from loadtest import bench_facts
from loadtest.answers import read_queries
from loadtest.bench import CACHE, QUERIES
from loadtest.bench_processes import FORCED, Started, build_example, care_server, running
from loadtest.client import PATH, Job, measure
from loadtest.errors import BenchError
from loadtest.footprint import sampled
from loadtest.http1 import HOST, port_of
from loadtest.open_loop import Flood, Offer, flood
from loadtest.tables import Quantiles, fact_lines, failures_text, heading, line, percentile

FACTOR = 10
SECONDS = 30.0
CALM_SECONDS = 10.0
CAPACITY_CONNECTIONS = 8
RECOVERED_IN_A_ROW = 10
RECOVERY_SECONDS = 20.0
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run; latencies in milliseconds, memory in megabytes."""

    unloaded: Quantiles
    capacity: float
    offered: float
    flood: Flood
    memory_mb: list[float]
    recovery_seconds: float | None

    @property
    def limit_ms(self) -> float:
        """What the p99 of the accepted should not exceed."""
        return 2 * self.unloaded.p99 + percentile(self.flood.batch_ms, 0.5)

    @property
    def is_sound(self) -> bool:
        whole = not self.flood.failures and self.flood.without_retry_after == 0
        return whole and bool(self.flood.accepted_ms) and self.recovery_seconds is not None


def overload(started: Started, queries: Sequence[str], mode: str, seconds: float) -> Result:
    """Measures one service; it must have been asked before, so that nothing is cold."""
    url = started.url
    alone = measure(Job(url, queries, mode, 1, min(seconds, CALM_SECONDS)))
    full = measure(Job(url, queries, mode, CAPACITY_CONNECTIONS, min(seconds, CALM_SECONDS), alone.sent))
    if not alone.latency_ms or not full.latency_ms:
        raise BenchError(f"the service refuses even without a load: {alone.failures or full.failures}")
    capacity = full.requests_per_second
    with sampled(started.process.pid) as memory_mb:
        offer = Offer(url, queries, mode, FACTOR * capacity, seconds, first_number=alone.sent + full.sent)
        flooded = flood(offer)
        if not flooded.accepted_ms:
            raise BenchError(f"nothing was accepted under load: {failures_text(flooded.failures)}")
        unloaded = Quantiles.of(alone.latency_ms)
        recovery = recovery_seconds(url, queries, mode, 2 * unloaded.p99)
    return Result(unloaded, capacity, offer.per_second, flooded, memory_mb, recovery)


def recovery_seconds(url: str, queries: Sequence[str], mode: str, quick_ms: float) -> float | None:
    """Seconds until the first of ten quick answers in a row; None if they never came."""
    began = time.monotonic()
    first, in_a_row = 0.0, 0
    with contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=TIMEOUT_SECONDS)) as connection:
        for number in count():
            asked = time.monotonic()
            if asked > began + RECOVERY_SECONDS:
                return None
            query = f"{queries[number % len(queries)]} {-number}"
            connection.request("POST", PATH, json.dumps({"query": query, "mode": mode}))
            answer = connection.getresponse()
            answer.read()
            quick = answer.status == 200 and (time.monotonic() - asked) * 1000 <= quick_ms
            in_a_row = in_a_row + 1 if quick else 0
            if in_a_row == 1:
                first = asked - began
            if in_a_row == RECOVERED_IN_A_ROW:
                return first
    raise AssertionError("count() does not end")


def as_markdown(facts: dict[str, str], result: Result) -> str:
    flooded = result.flood
    accepted, late = Quantiles.of(flooded.accepted_ms), Quantiles.of(flooded.late_ms)
    met = "yes" if accepted.p99 <= result.limit_ms else "no"
    before, highest, after = result.memory_mb[0], max(result.memory_mb), result.memory_mb[-1]
    recovery = "not within 20 s" if result.recovery_seconds is None else f"{result.recovery_seconds:.2f} s"
    refused = Quantiles.of(flooded.refused_ms) if flooded.refused_ms else None
    rows = {
        "unloaded, one connection, median / p99": f"{result.unloaded.median:.1f} / {result.unloaded.p99:.1f} ms",
        f"capacity, {CAPACITY_CONNECTIONS} connections": f"{result.capacity:.0f} answers/s",
        "offered": f"{result.offered:.0f} requests/s for {flooded.seconds:.1f} s",
        "sent (the rest found all connections busy)": f"{flooded.sent} ({flooded.unsent} unsent)",
        "the generator's own lateness, median / p99": f"{late.median:.1f} / {late.p99:.1f} ms",
        "accepted": f"{len(flooded.accepted_ms)}, {len(flooded.accepted_ms) / flooded.seconds:.0f}/s",
        "accepted, median / p99": f"{accepted.median:.1f} / {accepted.p99:.1f} ms",
        "limit: twice the unloaded p99 + one batch": f"{result.limit_ms:.1f} ms, kept: {met}",
        "refused with 429": str(len(flooded.refused_ms)),
        "refused, median / p99": "–" if refused is None else f"{refused.median:.1f} / {refused.p99:.1f} ms",
        "refusals without Retry-After": str(flooded.without_retry_after),
        "failures": failures_text(flooded.failures),
        "memory before / highest / after": f"{before:.0f} / {highest:.0f} / {after:.0f} MB",
        "recovered after": recovery,
    }
    table = [*heading("ten times the capacity", "measured"), *(line(name, value) for name, value in rows.items()), ""]
    return "\n".join([*fact_lines(facts), *table])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="loadtest.overload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collection", type=Path, help="a published collection (default: the example, built anew)")
    parser.add_argument("--queries", type=Path, default=QUERIES, help="JSON lines with a text each (the example's)")
    parser.add_argument("--mode", default="hybrid", help="dense, lexical or hybrid (%(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of the overload (%(default)s)")
    parser.add_argument("--cached", action="store_true", help="with the service's process cache")
    parser.add_argument("--serve", default="", help="further flags of care serve, as one argument ('--workers 2')")
    given = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "loadtest.overload", *(sys.argv[1:] if arguments is None else arguments)])
    machine = bench_facts.machine()
    settings = FORCED | (CACHE if given.cached else {})
    try:
        with _service(given.collection, settings, shlex.split(given.serve)) as started:
            queries = read_queries(given.queries)
            measure(Job(started.url, queries, given.mode, CAPACITY_CONNECTIONS, 2.0))
            result = overload(started, queries, given.mode, given.seconds)
    except BenchError as error:
        print(f"overload: {error}", file=sys.stderr)
        return 1
    facts = {
        "command": f"`{command}`",
        "commit": bench_facts.commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine,
        "settings": bench_facts.settings(settings),
        "load": f"{given.mode}; {len(queries)} queries, each time with another number after it",
    }
    print(as_markdown(facts, result))
    return 0 if result.is_sound else 1


@contextlib.contextmanager
def _service(collection: Path | None, settings: dict[str, str], flags: Sequence[str]) -> Iterator[Started]:
    with tempfile.TemporaryDirectory(prefix="care-overload-") as made:
        folder = Path(made)
        if collection is None:
            collection = folder / "collection"
            build_example(collection)
        with running(care_server(collection.resolve(), settings, *flags), folder) as started:
            yield started


if __name__ == "__main__":
    # So that the service is ended when this process is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
