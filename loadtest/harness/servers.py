"""Starts server processes, each on a free port: the service, the bare framework, or any command."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.harness import HOST, READY, REPOSITORY, BenchError, port_of
from loadtest.harness.machine import process_tree

CORPUS = "examples/corpus.jsonl"
READY_SECONDS = 300.0
STOP_SECONDS = 40.0
POLL_SECONDS = 0.1
TIMEOUT_SECONDS = 30.0
# For services that listen on loopback while they are measured.
ADMIN_TOKEN = secrets.token_urlsafe(16)
# Caches would answer instead of the service; the access log would be timed with it.
FORCED = {"CARE_LRU_MB": "0", "CARE_REDIS_URL": "", "CARE_ACCESS_LOG": "false"}
CACHE = {"CARE_LRU_MB": "64"}
BARE_OPTIONS = "--loop uvloop --http httptools --ws none --lifespan off --no-access-log --no-server-header"
# Part of the command line of the service's processes.
ENGINE_COMMAND, WORKER_COMMAND = "service.processes.engine", "service.processes.server"


@dataclass(frozen=True, slots=True)
class Server:
    """A server that can be started: its command, its port, and the path that answers 200 once it is ready."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    ready: str = READY


@dataclass(frozen=True, slots=True)
class Started:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """Stops it and its children, so that they use no processor time while another server is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def run_command(*command: object) -> str:
    """Runs a command in the repository and returns its output; raises BenchError with its last line if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(words[1:4])} … failed: {_last_line(done.stderr)}")
    return done.stdout


def care(*arguments: object) -> str:
    """Returns the output of `care …`."""
    return run_command(sys.executable, "cli.py", *arguments)


def build_example(collection: Path, corpus: str | Path = CORPUS, *flags: str, code: Path = REPOSITORY) -> Path:
    """Builds and publishes the snapshot of the example corpus, or of another one, by the program of a checkout."""
    program = code.resolve() / "cli.py"
    run_command(sys.executable, program, "index", "build", corpus, "--collection", collection, "--publish", *flags)
    return collection


def care_server(collection: Path, settings: Mapping[str, str] = FORCED, *flags: str) -> Server:
    """`care serve` on a published collection, by default without caches."""
    port = free_port()
    own = {"CARE_COLLECTION": str(collection), "CARE_HOST": HOST, "CARE_PORT": str(port)}
    environment = own | {"CARE_ADMIN_TOKEN": ADMIN_TOKEN} | dict(settings)
    return Server("service", [sys.executable, "cli.py", "serve", *flags], port, environment)


def bare_server(size: int) -> Server:
    """Returns the bare framework, which answers `size` bytes, with the options that `care serve` gives to uvicorn."""
    port = free_port()
    options = f"--factory --host {HOST} --port {port} {BARE_OPTIONS}".split()
    command = [sys.executable, "-m", "uvicorn", "loadtest.bare:create_app", *options]
    return Server("bare", command, port, {"BARE_BYTES": str(size)})


def connect(url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> contextlib.closing[http.client.HTTPConnection]:
    """Returns a connection that bypasses the environment's proxies; it opens again by itself after it was closed."""
    return contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=timeout_seconds))


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, bytes]:
    """Returns status and body of one request, whose own body is sent as JSON."""
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def get(url: str, path: str) -> tuple[int, bytes]:
    """Returns status and body of a GET."""
    with connect(url, 10) as connection:
        return exchange(connection, "GET", path)


@contextlib.contextmanager
def running(server: Server, folder: Path) -> Iterator[Started]:
    """Runs the server from its readiness to the end of the block; `folder` takes its log."""
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
        started.resume()  # a paused process does not handle SIGTERM
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
    output = _last_line(log.read_text(errors="replace"))
    raise BenchError(f"the {server.name} process {what} before it was ready: {output}")


def free_port() -> int:
    """Returns a port below those of outgoing connections, one of which might take it before the server does."""
    while True:
        port = random.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def _last_line(text: str) -> str:
    return (text.strip() or "no output").splitlines()[-1]
