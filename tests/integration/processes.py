"""A service of several processes, as an operator starts it, with helpers to inspect and kill its processes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.api.support import AS_ADMIN, ENCODER, OPEN, PATIENT, Built

WAIT_SECONDS = 60.0
SERVE = "from service.command import serve; from service.settings import Settings; serve(Settings())"
READY = re.compile(r"CARE Search is ready at (http://127\.0\.0\.1:\d+) \(8 documents, snapshot (\S+)\)\n")


@dataclass(frozen=True)
class Reply:
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:  # noqa: ANN401 - whatever the body holds
        return json.loads(self.text)


class Service:
    """One running service; its processes are found in /proc by their parent."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address

    def children(self) -> dict[str, int]:
        """Returns the process id of every running role: "engine", "worker 1", …"""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if int(_status(folder, "PPid")) == self.process.pid and not _status(folder, "State").startswith(
                        "Z"
                    ):
                        found[_name((folder / "cmdline").read_bytes())] = int(folder.name)
        return found

    def send(self, method: str, path: str, body: object = None) -> Reply:
        """Sends one request on a new connection: any worker may answer it."""
        host, _, port = self.address.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_SECONDS)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), AS_ADMIN)
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
        finally:
            connection.close()

    def get(self, path: str, **parameters: object) -> Reply:
        return self.send("GET", f"{path}?{urlencode(parameters)}" if parameters else path)

    def search(self, body: object) -> Reply:
        return self.send("POST", "/v1/search", body)

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/readyz").status == 200
        return False

    def metric(self, name: str) -> float:
        """Returns the value of a series in /metrics, or 0 if it is missing."""
        values = re.findall(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(values[0]) if values else 0.0

    def memory_mb(self, pid: int) -> float:
        """Returns the memory of a process that it does not share with others."""
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return sum(int(kilobytes) for kilobytes in re.findall(r"Private_(?:Clean|Dirty): +(\d+) kB", rollup)) / 1024


@contextlib.contextmanager
def started(built: Built, command: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs Python with a command that serves; yields the process and its address once it is ready."""
    own = {"CARE_COLLECTION": str(built.root), "CARE_ENCODER": str(ENCODER), "CARE_PORT": "0", "CARE_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        env=os.environ | {"PYTHONPATH": "."} | PATIENT | own | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = READY.fullmatch(line)
        assert match, line + (process.stderr.read() if process.stderr and process.poll() is not None else "")
        yield process, match[1]
    finally:
        if process.poll() is None:
            process.kill()  # its children notice and end by themselves
        process.communicate()


@contextlib.contextmanager
def service(built: Built, **environment: str) -> Iterator[Service]:
    """Starts a service and waits until it is ready; it and its children are gone afterwards."""
    with started(built, SERVE, **OPEN | environment) as (process, address):
        running = Service(process, address)
        yield running
        children = running.children()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children.values()))


def until(condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Waits until the condition holds."""
    ending = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ending, "the condition never held"
        time.sleep(0.05)


class Load:
    """Clients that send requests without pause, each on a new connection, and keep the answers."""

    def __init__(self, running: Service, bodies: list[dict[str, Any]], clients: int = 3) -> None:
        self._running = running
        self._bodies = bodies
        self._stopped = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(clients)
        self._clients = clients
        self.answers: list[Reply] = []
        self.broken = 0

    def __enter__(self) -> Load:
        self._futures = [self._pool.submit(self._ask, number) for number in range(self._clients)]
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._pool.shutdown()
        for future in self._futures:
            future.result()

    def statuses(self) -> set[int]:
        return {answer.status for answer in self.answers}

    def wait_for(self, status: int, count: int = 1) -> None:
        """Waits for `count` further answers with this status."""
        seen = len(self.answers)
        until(lambda: sum(answer.status == status for answer in self.answers[seen:]) >= count)

    def _ask(self, turn: int) -> None:
        while not self._stopped.is_set():
            body = self._bodies[turn % len(self._bodies)]
            try:
                self.answers.append(self._running.search(body))
            except (ConnectionError, http.client.HTTPException):
                self.broken += 1  # the worker of this connection is gone
            turn += 1
            self._stopped.wait(0.05)


def assert_unmixed(answers: list[Reply], built: Built) -> set[str]:
    """Checks that every answer comes from one version; returns the letters of the versions."""
    letters = set()
    for answer in answers:
        if answer.status == 200:
            body = answer.json()
            letter = built.letters[body["snapshot"]]
            ids = [hit["id"] for result in body["results"] for hit in result["hits"]]
            assert ids
            assert all(found.startswith(f"{letter}-") for found in ids)
            letters.add(letter)
    return letters


def _status(folder: Path, field: str) -> str:
    return re.findall(rf"^{field}:\s+(.+)$", (folder / "status").read_text(), re.MULTILINE)[0]


def _name(command: bytes) -> str:
    arguments = command.decode().split("\0")
    return arguments[arguments.index("--name") + 1] if "--name" in arguments else "engine"
