"""Servers as processes of their own: the real service on a snapshot, the bare framework, or another by its command.

Each is started by its command line on a free port, is ready when it says so over HTTP, and is ended by its own pid.
Knows nothing of measurements.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.bare import READY
from loadtest.harness.client import REPOSITORY
from loadtest.harness.errors import BenchError
from loadtest.harness.footprint import process_tree
from loadtest.harness.http1 import HOST, port_of

CORPUS = "examples/corpus.jsonl"
READY_SECONDS = 300.0
STOP_SECONDS = 40.0
POLL_SECONDS = 0.1
# Of services that listen on loopback for the length of a measurement.
ADMIN_TOKEN = secrets.token_urlsafe(16)
# Caches would answer instead of the service; the log would be timed with it.
FORCED = {"CARE_LRU_MB": "0", "CARE_REDIS_URL": "", "CARE_ACCESS_LOG": "false"}


@dataclass(frozen=True, slots=True)
class Server:
    """A server that can be started: its command, the port that it is told, and the path that answers 200 once it is
    ready."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: str = READY


@dataclass(frozen=True, slots=True)
class Started:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """Takes the processor from it and its children, so that they cost nothing while another one is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def build_example(collection: Path, corpus: str | Path = CORPUS, *flags: str) -> None:
    """Builds and publishes the snapshot of the example corpus, or of another, as a user would."""
    care_index("build", str(corpus), "--collection", str(collection), "--publish", *flags)


def care_index(*arguments: str) -> str:
    """Runs `care index …` and gives what it printed."""
    command = [sys.executable, "cli.py", "index", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"care index {arguments[0]} failed: {_last_line(done.stderr)}")
    return done.stdout


def care_server(collection: Path, settings: Mapping[str, str] = FORCED, *flags: str) -> Server:
    """`care serve` on a published collection, caches off unless `settings` say otherwise."""
    port = free_port()
    own = {"CARE_COLLECTION": str(collection), "CARE_HOST": HOST, "CARE_PORT": str(port)}
    environment = own | {"CARE_ADMIN_TOKEN": ADMIN_TOKEN} | dict(settings)
    return Server("service", [sys.executable, "cli.py", "serve", *flags], port, environment)


@contextlib.contextmanager
def service(collection: Path, folder: Path) -> Iterator[str]:
    """The service on a published collection, caches off; its address. `folder` takes what it logs."""
    with running(care_server(collection), folder) as started:
        yield started.url


@contextlib.contextmanager
def bare(size: int, folder: Path) -> Iterator[str]:
    """The bare framework answering `size` bytes; its address. `folder` takes what it logs."""
    port = free_port()
    command = [sys.executable, "-m", "loadtest.bare", "--port", str(port), "--bytes", str(size)]
    with running(Server("bare", command, port), folder) as started:
        yield started.url


def get(url: str, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; straight to the socket, since a proxy of the environment would be asked otherwise."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextlib.contextmanager
def running(server: Server, folder: Path) -> Iterator[Started]:
    """The server from its readiness to the end of the block; `folder` takes what it logs."""
    log = folder / f"{server.name}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            server.command,
            cwd=REPOSITORY,
            env={**os.environ, **server.environment},
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    started = Started(f"http://{HOST}:{server.port}", process)
    try:
        _wait_ready(server, started, log)
        yield started
    finally:
        started.resume()  # a process that is paused does not hear that it should end
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(server: Server, started: Started, log: Path) -> None:
    give_up = time.monotonic() + READY_SECONDS
    while started.process.poll() is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(started.url, server.ready)[0] == 200:
                return
        time.sleep(POLL_SECONDS)
    ended = started.process.poll()
    what = f"took {READY_SECONDS:.0f} s" if ended is None else f"ended with {ended}"
    said = _last_line(log.read_text(errors="replace"))
    raise BenchError(f"the {server.name} process {what} before it was ready: {said}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(text: str) -> str:
    return (text.strip() or "it said nothing").splitlines()[-1]
