"""`make overload`: offers two and ten times what the service can answer, and measures answers and refusals.

  python -m loadtest.lab.overload            the example corpus, a service started for the run, caches off
  python -m loadtest.lab.overload --proxy    behind HAProxy with deploy/haproxy.cfg

Measured one after another: one connection (unloaded); 8 connections, which fill the batches (capacity); 2 and 10 times
the capacity, offered at even intervals; the seconds until ten requests in a row take at most twice the unloaded p99
(recovery). The generator shares the cores with the service; how late it sent its requests is reported.

Limits, at both loads: every answer is a search or a 429 with Retry-After. Behind the proxy at least 80 % of the
capacity is answered, with a p99 at most 100 ms above the unloaded p99, and the median refusal takes less than 20 ms.
Without it the process that answers refuses, too, at some 0.2 ms each: at twice the capacity at least 60 % is answered,
with a p99 at most 1 s above, at ten times 20 % and 2 s. Exit status 1 if a limit is missed or the service does not
recover.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from loadtest.answers import read_queries
from loadtest.harness import HOST, PATH, QUERIES, REPOSITORY, BenchError, above_zero, port_of, servers
from loadtest.harness.generator import MAX_OPEN_CONNECTIONS, Job, Measurement, measure
from loadtest.harness.machine import sampled, settings
from loadtest.harness.report import Program, Quantiles, exit_with, failures_text, markdown, percentile, table

MODE = "hybrid"
FACTORS = (2, 10)
SECONDS = 20.0
CALM_SECONDS = 10.0
CAPACITY_CONNECTIONS = 8
RECOVERED_IN_A_ROW = 10
RECOVERY_SECONDS = 20.0
TIMEOUT_SECONDS = 10.0
# With and without a proxy in front of the service: the least share of the capacity, and milliseconds above the p99.
LIMITS = {(True, 2): (0.8, 100.0), (True, 10): (0.8, 100.0), (False, 2): (0.6, 1000.0), (False, 10): (0.2, 2000.0)}
REFUSED_MEDIAN_MS = 20.0
PROXY_CONFIG = REPOSITORY / "deploy" / "haproxy.cfg"
# CARE_IN_FLIGHT is what the service answers in this time, but at least a batch.
IN_FLIGHT_SECONDS = 0.08
LEAST_IN_FLIGHT = 8


@dataclass(frozen=True, slots=True)
class Load:
    """One offered load and its result."""

    factor: int
    offered: float
    flood: Measurement
    recovery_seconds: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run; latencies in milliseconds, memory in megabytes."""

    unloaded: Quantiles
    capacity: float
    loads: list[Load]
    memory_mb: list[float]
    proxied: bool

    def misses(self) -> list[str]:
        """Returns the limits that were exceeded."""
        found = []
        for load in self.loads:
            least_share, extra_ms = LIMITS[self.proxied, load.factor]
            flood = load.flood
            refused = flood.refused_ms if self.proxied else []
            kept = {
                "only searches and refusals": not flood.failures and not flood.without_retry_after,
                "recovered": load.recovery_seconds is not None,
                f"answered at least {least_share:.0%} of the capacity": flood.requests_per_second / self.capacity
                >= least_share,
                "p99 of the answered": percentile(flood.latency_ms, 0.99) <= self.unloaded.p99 + extra_ms,
                "median refusal": not refused or percentile(refused, 0.5) < REFUSED_MEDIAN_MS,
            }
            found += [f"{load.factor} x: {name}" for name, is_kept in kept.items() if not is_kept]
        return found


def overload(started: servers.Started, url: str, queries: Sequence[str], seconds: float) -> Result:
    """Measures a warm service at `url`, which may be a proxy's."""
    calm = min(seconds, CALM_SECONDS)
    alone = measure(Job(url, queries, MODE, 1, calm))
    full = measure(Job(url, queries, MODE, CAPACITY_CONNECTIONS, calm, alone.sent))
    if not alone.latency_ms or not full.latency_ms:
        raise BenchError(f"the service refuses even without a load: {alone.failures or full.failures}")
    unloaded, capacity, number = Quantiles.of(alone.latency_ms), full.requests_per_second, alone.sent + full.sent
    loads = []
    with sampled(started.process.pid) as memory_mb:
        for factor in FACTORS:
            offered = factor * capacity
            flood = measure(Job(url, queries, MODE, MAX_OPEN_CONNECTIONS, seconds, number, per_second=offered))
            number += flood.sent
            if not flood.latency_ms:
                raise BenchError(f"nothing was accepted under load: {failures_text(flood.failures)}")
            loads.append(Load(factor, offered, flood, recovery_seconds(url, queries, 2 * unloaded.p99)))
    return Result(unloaded, capacity, loads, memory_mb, proxied=url != started.url)


def recovery_seconds(url: str, queries: Sequence[str], quick_ms: float) -> float | None:
    """Seconds until the first of ten quick answers in a row; None if they never came."""
    began = time.monotonic()
    first, in_a_row = 0.0, 0
    with servers.connect(url, TIMEOUT_SECONDS) as connection:
        for number in count():
            asked = time.monotonic()
            if asked > began + RECOVERY_SECONDS:
                return None
            body = {"query": f"{queries[number % len(queries)]} {-number}", "mode": MODE}
            status, _ = servers.exchange(connection, "POST", PATH, body)
            quick = status == 200 and (time.monotonic() - asked) * 1000 <= quick_ms
            in_a_row = in_a_row + 1 if quick else 0
            if in_a_row == 1:
                first = asked - began
            if in_a_row == RECOVERED_IN_A_ROW:
                return first
    raise AssertionError("count() does not end")


def as_markdown(facts: dict[str, str], result: Result) -> str:
    columns = [_column(result, load) for load in result.loads]
    before, highest, after = result.memory_mb[0], max(result.memory_mb), result.memory_mb[-1]
    calm = (
        f"Unloaded, one connection: median {result.unloaded.median:.1f} ms, p99 {result.unloaded.p99:.1f} ms. "
        f"Capacity, {CAPACITY_CONNECTIONS} connections: {result.capacity:.0f} answers/s. "
        f"Memory before / highest / after: {before:.0f} / {highest:.0f} / {after:.0f} MB.\n"
        f"Limits missed: {'; '.join(result.misses()) or 'none'}.\n"
    )
    names = [f"{load.factor} x the capacity" for load in result.loads]
    rows = [" | ".join([name, *(column[name] for column in columns)]) for name in columns[0]]
    return markdown(facts, calm, table(" | ".join(["offered", *names]), rows))


def _column(result: Result, load: Load) -> dict[str, str]:
    flood = load.flood
    per_second = flood.requests_per_second
    recovery = "not within 20 s" if load.recovery_seconds is None else f"{load.recovery_seconds:.2f} s"
    return {
        "requests/s offered": f"{load.offered:.0f} ({flood.unsent} found no free connection)",
        "generator late by, median / p99": f"{Quantiles.of(flood.late_ms):.1f} ms",
        "answered": f"{per_second:.0f}/s, {per_second / result.capacity:.0%} of the capacity",
        "answered, median / p99": f"{Quantiles.of(flood.latency_ms):.1f} ms",
        "refused with 429": str(len(flood.refused_ms)),
        "refused, median / p99": f"{Quantiles.of(flood.refused_ms):.1f} ms" if flood.refused_ms else "–",
        "refusals without Retry-After": str(flood.without_retry_after),
        "failures": failures_text(flood.failures),
        "recovered after": recovery,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("overload", "loadtest.lab.overload", __doc__)
    program.add_argument("--seconds", type=above_zero, default=SECONDS, help="length of the overload (%(default)s)")
    program.add_argument("--proxy", action="store_true", help="behind HAProxy with deploy/haproxy.cfg")
    return program.run(arguments, _run)


def _run(options: argparse.Namespace, facts: dict[str, str]) -> int:
    queries = read_queries(QUERIES)
    with tempfile.TemporaryDirectory(prefix="care-overload-") as made, contextlib.ExitStack() as stack:
        server = servers.care_server(servers.build_example(Path(made) / "collection"))
        started = stack.enter_context(servers.running(server, Path(made)))
        warm = measure(Job(started.url, queries, MODE, CAPACITY_CONNECTIONS, 3.0))
        in_flight = max(LEAST_IN_FLIGHT, round(IN_FLIGHT_SECONDS * warm.requests_per_second))
        url = stack.enter_context(proxy(started.url, in_flight)) if options.proxy else started.url
        result = overload(started, url, queries, options.seconds)
    facts |= {
        "settings": settings(servers.FORCED),
        "load": f"{MODE}; {len(queries)} queries, each time with another number after it"
        + (f"; HAProxy with CARE_IN_FLIGHT={in_flight}" if options.proxy else ""),
    }
    print(as_markdown(facts, result))
    return 1 if result.misses() else 0


@contextlib.contextmanager
def proxy(url: str, in_flight: int, config: Path = PROXY_CONFIG) -> Iterator[str]:
    """Runs HAProxy with deploy/haproxy.cfg in front of the service at `url`; yields the proxy's address."""
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None:
        raise BenchError("haproxy is not installed; `apt-get install haproxy` brings it")
    port = servers.free_port()
    own = {"CARE_PROXY": f"{HOST}:{port}", "CARE_SERVICE": f"{HOST}:{port_of(url)}", "CARE_IN_FLIGHT": str(in_flight)}
    with tempfile.TemporaryDirectory(prefix="care-proxy-") as folder:
        server = servers.Server("haproxy", [program, "-db", "-f", str(config)], port, own, ready="/livez")
        with servers.running(server, Path(folder)) as started:
            yield started.url


def several(urls: Sequence[str], folder: Path) -> Path:
    """Writes deploy/haproxy.cfg with a line for each service after the first, whose address `proxy` gives it."""
    text = PROXY_CONFIG.read_text(encoding="utf-8").rstrip()
    (line,) = [line for line in text.splitlines() if line.startswith("    server care ")]
    for number, url in enumerate(urls[1:], 2):
        own = line.replace("server care ", f"server care{number} ")
        text += "\n" + own.replace('"${CARE_SERVICE}"', f"{HOST}:{port_of(url)}")
    config = folder / "haproxy.cfg"
    config.write_text(f"{text}\n", encoding="utf-8")
    return config


if __name__ == "__main__":
    exit_with(main)
