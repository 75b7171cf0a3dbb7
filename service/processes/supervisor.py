"""Supervisor: starts the engine process and the HTTP workers, restarts any that ends, and forwards signals.

It replaces an engine that no longer answers, and prints once that the service is ready. It answers no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import orjson
from pydantic import SecretStr

import service
from service.engine.jobs import Status
from service.engine.remote import frames
from service.engine.remote.frames import BadFrame, FrameReader, Kind
from service.errors import StartFailed
from service.metrics import SHARED_FOLDER
from service.processes.startup import StartupMessage, configure_logging, listeners, reserve, with_ports
from service.settings import ENV_PREFIX, Settings

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0  # between two checks of the engine
GRACE_SECONDS = 5.0  # time to end beyond the time that accepted requests have
STARTS = 3  # a process may end this often without a message before it was ever ready
# Delay before a restart: doubled each time, unless the process had run for STEADY_SECONDS.
FIRST_DELAY_SECONDS = 0.1
MOST_DELAY_SECONDS = 5.0
STEADY_SECONDS = 10.0


def supervise(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT, then lets every process finish what it accepted. Raises StartFailed."""
    configure_logging(settings, "supervisor")
    with (
        listeners(settings, reserve) as taken,
        tempfile.TemporaryDirectory(prefix="care-") as folder,
    ):
        asyncio.run(Supervisor(with_ports(settings, taken), Path(folder)).run())


class Supervisor:
    """The processes of one service; `folder` holds their socket and the numbers behind /metrics."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._metrics = folder / "metrics"
        self._metrics.mkdir()
        self._socket = folder / "engine.sock"
        self._announced = False
        self._stop = asyncio.Event()
        # TMPDIR: the files of a killed process are deleted with the folder.
        environment = environment_of(settings) | {SHARED_FOLDER: str(self._metrics), "TMPDIR": str(folder)}

        def child(name: str, *command: str) -> Child:
            on_ready = self._announce if name != "engine" else lambda text: None
            return Child(name, command, environment, settings.start_seconds, on_ready, self._forget)

        self._engine: Child | None = None
        engine: list[str] = []
        if settings.has_engine_process:
            self._engine = child("engine", "service.processes.engine", "--socket", str(self._socket))
            engine = ["--engine", str(self._socket)]
        self._workers = [
            child(name, "service.processes.server", *engine, "--name", name)
            for name in (f"worker {number}" for number in range(1, settings.workers + 1))
        ]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._request_end)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        keepers: list[Coroutine[Any, Any, object]] = [self._stop.wait(), *map(self._keep_worker, self._workers)]
        if self._engine is not None:
            keepers.append(self._engine.keep())
            if self._settings.watchdog_seconds:
                keepers.append(self._watch(self._engine))
        tasks = [loop.create_task(keeper) for keeper in keepers]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _keep_worker(self, worker: Child) -> None:
        if self._engine is not None:
            await self._engine.ready.wait()
        await worker.keep()

    async def _watch(self, engine: Child) -> None:
        """Kills an engine that does not answer a query in time; its keeper starts another."""
        while True:
            await engine.ready.wait()
            process = engine.process
            try:
                async with asyncio.timeout(self._settings.watchdog_seconds):
                    answered = await check_engine(self._socket)
            except (OSError, TimeoutError, BadFrame):
                answered = False
            if not answered and engine.ready.is_set() and engine.process is process and not self._stop.is_set():
                logger.error("the engine did not answer the watchdog's query; it is killed")
                engine.kill(process)
            await asyncio.sleep(WATCH_SECONDS)

    def _announce(self, text: str) -> None:
        """Prints the message of the first worker that is ready."""
        if not self._announced:
            self._announced = True
            print(text, flush=True)

    def _reload(self) -> None:
        for worker in self._workers:
            worker.send_signal(signal.SIGHUP)

    def _request_end(self) -> None:
        """Lets every process finish; a second signal kills immediately."""
        if self._stop.is_set():
            for child in (*self._workers, self._engine):
                if child is not None:
                    child.kill()
        self._stop.set()

    async def _end(self) -> None:
        """Ends the workers first: their last requests need the engine."""
        timeout = self._settings.drain_seconds + self._settings.shutdown_seconds + GRACE_SECONDS
        await asyncio.gather(*(worker.end(timeout) for worker in self._workers))
        if self._engine is not None:
            await self._engine.end(GRACE_SECONDS)

    def _forget(self, pid: int) -> None:
        """Deletes the gauges of a process that ended; its counters stay."""
        for gauge in self._metrics.glob(f"gauge_live*_{pid}.db"):
            gauge.unlink()


@dataclass(slots=True, eq=False)
class Child:
    """A process that is kept running: started, and restarted when it ends.

    `command` is a module and its arguments; `on_ready` gets the process's message, `on_end` its id.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    start_seconds: float
    on_ready: Callable[[str], None]
    on_end: Callable[[int], None]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: Process | None = None
    _missed: int | None = None
    _ending: bool = False
    _was_ready: bool = False

    async def keep(self) -> None:
        """Runs the process again and again until `end`; raises StartFailed if it never becomes ready."""
        starts, delay = 0, 0.0
        while not self._ending:
            began = monotonic()
            starts += 1
            message = await self._run(again=self._was_ready)
            if self._ending:
                return
            if not self._was_ready and (message is not None or starts == STARTS):
                silent = f"the {self.name} ended {STARTS} times at its start; its log says why"
                raise StartFailed(silent if message is None else message.text)
            steady = monotonic() - began > STEADY_SECONDS
            delay = FIRST_DELAY_SECONDS if steady or not delay else min(2 * delay, MOST_DELAY_SECONDS)
            reason = f": {message.text}" if message is not None and not message.ready else ""
            logger.error("the %s ended%s; it is started again in %.1f s", self.name, reason, delay)
            await asyncio.sleep(delay)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process; one that is starting gets it when it is ready and can handle it."""
        if self.process is None or not self.ready.is_set():
            self._missed = number
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self, process: Process | None = None) -> None:
        """Kills the process; the given one only if it was not replaced yet."""
        if self.process is not None and process in (None, self.process):
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def end(self, timeout_seconds: float) -> None:
        """Ends the process for good: by SIGTERM, after the timeout by SIGKILL."""
        self._ending = True
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_seconds)
        except TimeoutError:
            logger.error("the %s does not end; it is killed", self.name)
            self.kill(process)
            await process.wait()

    async def _run(self, *, again: bool) -> StartupMessage | None:
        """Runs one process from start to end; returns its message, None if it sent none."""
        ours, its = socket.socketpair()
        command = [sys.executable, "-m", *self.command, *(["--again"] if again else [])]
        with its:
            self.process = await asyncio.create_subprocess_exec(*command, stdin=its.fileno(), env=self.environment)
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            try:
                async with asyncio.timeout(self.start_seconds):
                    line = await reader.readline()
            except TimeoutError:
                self.kill()
                await self.process.wait()
                late = f"the {self.name} was not ready after {self.start_seconds:g} s and was killed"
                text = f"{late}; its log says how far it came, CARE_START_SECONDS allows more"
                return StartupMessage(ready=False, text=text)
            message = StartupMessage(**orjson.loads(line)) if line else None
            if message is not None and message.ready:
                self._was_ready = True
                self.ready.set()
                self.on_ready(message.text)
                if (missed := self._missed) is not None:
                    self._missed = None
                    self.send_signal(missed)
            await self.process.wait()
            return message
        finally:
            self.ready.clear()
            self.kill()
            writer.close()
            self.on_end(self.process.pid)


async def check_engine(path: Path) -> bool:
    """Sends a query through the engine behind the socket; returns whether it succeeds. Has no timeout.

    A database that is away is not the engine's fault: another engine would not reach it either.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(frames.write_control(Kind.CHECK, 1))
        pieces = FrameReader()
        while data := await reader.read(frames.READ_BYTES):
            for body in pieces.feed(data):
                return frames.read_response(body).status in (Status.DONE, Status.DATABASE_AWAY)
        return False
    finally:
        writer.close()


def environment_of(settings: Settings) -> dict[str, str]:
    """Returns the environment that gives a process these settings, and this code."""
    own = {}
    for name, value in settings:
        plain = value.get_secret_value() if isinstance(value, SecretStr) else value
        own[f"{ENV_PREFIX}{name}".upper()] = "" if plain is None else str(plain)
    places = [str(Path(service.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    # Queries are medical: no telemetry.
    private = {"ORT_DISABLE_TELEMETRY": "1"}
    return private | os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
