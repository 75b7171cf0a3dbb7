"""The two contestants as processes of their own: the real service on a snapshot, and the bare framework.

Each is started by its command line on a free port, is ready when `/readyz` says so, and is ended by its own pid.
Knows nothing of measurements.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from loadtest.bare import READY
from loadtest.client import HOST, REPOSITORY, BenchError, port_of

CORPUS = "examples/corpus.jsonl"
READY_SECONDS = 120.0
STOP_SECONDS = 40.0
POLL_SECONDS = 0.1
# Caches would answer instead of the service; the log would be timed with it.
FORCED = {"CARE_LRU_MB": "0", "CARE_REDIS_URL": "", "CARE_ACCESS_LOG": "false"}


def build_example(collection: Path, corpus: str | Path = CORPUS) -> None:
    """Builds and publishes the snapshot of the example corpus, or of another, as a user would."""
    care_index("build", str(corpus), "--collection", str(collection), "--publish")


def care_index(*arguments: str) -> str:
    """Runs `care index …` and gives what it printed."""
    command = [sys.executable, "cli.py", "index", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"care index {arguments[0]} failed: {_last_line(done.stderr)}")
    return done.stdout


@contextlib.contextmanager
def service(collection: Path, folder: Path) -> Iterator[str]:
    """The service on a published collection, caches off; its address. `folder` takes what it logs."""
    port = _free_port()
    settings = {"CARE_COLLECTION": str(collection), "CARE_HOST": HOST, "CARE_PORT": str(port)} | FORCED
    with _running("service", [sys.executable, "cli.py", "serve"], settings, port, folder) as url:
        yield url


@contextlib.contextmanager
def bare(size: int, folder: Path) -> Iterator[str]:
    """The bare framework answering `size` bytes; its address. `folder` takes what it logs."""
    port = _free_port()
    command = [sys.executable, "-m", "loadtest.bare", "--port", str(port), "--bytes", str(size)]
    with _running("bare", command, {}, port, folder) as url:
        yield url


def get(url: str, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; straight to the socket, since a proxy of the environment would be asked otherwise."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port_of(url), timeout=10)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextlib.contextmanager
def _running(name: str, command: list[str], settings: Mapping[str, str], port: int, folder: Path) -> Iterator[str]:
    url = f"http://{HOST}:{port}"
    log = folder / f"{name}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | settings, stdout=written, stderr=subprocess.STDOUT
        )
    try:
        _wait_ready(name, process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + READY_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if get(url, READY)[0] == 200:
                return
        time.sleep(POLL_SECONDS)
    what = f"ended with {process.returncode}" if process.poll() is not None else f"took {READY_SECONDS:.0f} s"
    raise BenchError(f"the {name} process {what} before it was ready: {_last_line(log.read_text(errors='replace'))}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _last_line(text: str) -> str:
    return (text.strip() or "it said nothing").splitlines()[-1]
