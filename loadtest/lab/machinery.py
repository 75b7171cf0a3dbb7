"""Injects faults of the disk, the clock and the proxy (`make chaos`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.harness import BenchError, servers
from loadtest.harness.machine import command_lines
from loadtest.lab.crowd import Crowd, Event
from loadtest.lab.faults import Fault, Stage, administer, is_ready
from loadtest.lab.overload import proxy, several

DRAIN_SECONDS = 4
DISK_MB = 64
FAKETIME = "/usr/lib/*/faketime/libfaketimeMT.so.1"
JUMP_SECONDS = 3.0
DAY = 86_400


@dataclass
class Disk(Stage):
    """A service on a file system of its own, in memory, that becomes full or read-only while documents are posted."""

    acknowledged: int = 0

    @contextlib.contextmanager
    def running(self, connections: int) -> Iterator[Crowd]:
        if os.geteuid() != 0:
            raise BenchError("a file system can be mounted by root only; name the other faults, or run it as root")
        place = self.folder / "disk"
        place.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", place)
        try:
            shutil.copytree(self.corpus.collection, place / "collection")
            with servers.running(servers.care_server(place / "collection"), self.folder) as self.service:
                yield self.corpus.crowd(self.service.url, connections)
        finally:
            _run("umount", "--lazy", place)

    def faults(self) -> Sequence[Fault]:
        return [
            Fault("disk full", "tmpfs filled; documents posted meanwhile", self._fill, self._all_are_there),
            Fault("disk read-only", "remounted; documents posted meanwhile", self._lock, self._all_are_there),
        ]

    def _post(self) -> bool:
        """Posts one document; whether it was acknowledged."""
        document = {"id": self._id(self.acknowledged), "text": f"zxqv{self.acknowledged}"}
        done = administer(self.service.url, "/v1/documents", {"documents": [document]}) == 200
        self.acknowledged += done
        return done

    def _try_to_post(self) -> Iterator[Event]:
        """Posts while nothing can be written: wrong if a document is acknowledged."""
        for _ in range(5):
            yield Event(time.monotonic(), 0.0, None, wrong=self._post())

    def _all_are_there(self) -> bool:
        paths = [f"/v1/documents/{self._id(number)}" for number in range(self.acknowledged)]
        return self._post() and all(servers.get(self.service.url, path)[0] == 200 for path in paths)

    def _id(self, number: int) -> str:
        served = (self.corpus.collection / "CURRENT").read_text().strip()
        return f"{self.corpus.prefixes[served]}posted-{number}"

    def _fill(self) -> Iterator[Event]:
        filler = self.folder / "disk" / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(65536)):
                pass
        yield from self._try_to_post()
        filler.unlink()

    def _lock(self) -> Iterator[Event]:
        place = self.folder / "disk"
        _run("mount", "-o", "remount,ro", place)
        yield from self._try_to_post()
        _run("mount", "-o", "remount,rw", place)


class Clock(Stage):
    """A service whose wall clock jumps (libfaketime); the monotonic clock continues, as the kernel's does."""

    @contextlib.contextmanager
    def running(self, connections: int) -> Iterator[Crowd]:
        libraries = list(Path("/").glob(FAKETIME[1:]))
        if not libraries:
            raise BenchError("libfaketime is not installed; `apt-get install faketime` brings it")
        self._jump(0)
        jumping = {"LD_PRELOAD": str(libraries[0]), "FAKETIME_TIMESTAMP_FILE": str(self.folder / "clock")}
        jumping |= {"FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        settings = servers.FORCED | servers.CACHE | jumping
        with servers.running(servers.care_server(self.corpus.collection, settings), self.folder) as self.service:
            yield self.corpus.crowd(self.service.url, connections)

    def faults(self) -> Sequence[Fault]:
        how = f"a day, for {JUMP_SECONDS:g} s (libfaketime, wall clock alone)"
        return [
            Fault(name, how, self._jumping(seconds), self.is_ready, cached=True)
            for name, seconds in (("clock put forward", DAY), ("clock put back", -DAY))
        ]

    def _jump(self, seconds: int) -> None:
        (self.folder / "clock").write_text(f"{seconds:+d}")

    def _jumping(self, seconds: int) -> Callable[[], None]:
        def inject() -> None:
            self._jump(seconds)
            time.sleep(JUMP_SECONDS)
            self._jump(0)

        return inject


@dataclass
class Proxied(Stage):
    """Two services behind deploy/haproxy.cfg: one is restarted after the other, and a worker is killed."""

    services: Sequence[servers.Server] = ()
    started: list[tuple[servers.Started, contextlib.ExitStack]] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self, connections: int) -> Iterator[Crowd]:
        settings = servers.FORCED | {"CARE_DRAIN_SECONDS": str(DRAIN_SECONDS)}
        self.services = [servers.care_server(self.corpus.collection, settings, "--workers", "2") for _ in range(2)]
        try:
            self.started += [self._start(server) for server in self.services]
            urls = [started.url for started, _ in self.started]
            with proxy(urls[0], 64, several(urls, self.folder)) as url:
                yield self.corpus.crowd(url, connections)
        finally:
            for _, stack in self.started:
                stack.close()

    def faults(self) -> Sequence[Fault]:
        upgrade = f"two services, one after the other, CARE_DRAIN_SECONDS={DRAIN_SECONDS}"
        return [
            Fault("upgrade behind the proxy", upgrade, self._upgrade, self.is_ready),
            Fault("worker killed behind the proxy", "SIGKILL, one of two of one service", self._kill, self.is_ready),
        ]

    def is_ready(self) -> bool:
        return all(is_ready(started.url) for started, _ in self.started)

    def _start(self, server: servers.Server) -> tuple[servers.Started, contextlib.ExitStack]:
        stack = contextlib.ExitStack()
        return stack.enter_context(servers.running(server, self.folder)), stack

    def _upgrade(self) -> None:
        for number, server in enumerate(self.services):
            self.started[number][1].close()
            self.started[number] = self._start(server)
            time.sleep(2.5)  # until the proxy has seen it: two checks

    def _kill(self) -> None:
        words = command_lines(self.started[0][0].process.pid)
        os.kill(next(pid for pid, line in words.items() if servers.WORKER_COMMAND in line), signal.SIGKILL)


def _run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"{command[0]} failed: {done.stderr.strip()}")
