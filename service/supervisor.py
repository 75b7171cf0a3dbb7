"""The parent of several processes: one engine, where there is one, and HTTP workers that share an address.

It starts them, starts again what ends, replaces an engine that no longer answers, hands on the signals, and says once
that the service is ready. It answers no request itself. Knows nothing of HTTP, encoders or snapshots.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from pydantic import SecretStr

import service
from service.child import Child
from service.engine.check import check_engine
from service.engine.frames import BadFrame
from service.listener import reserve
from service.logs import configure_logging
from service.metrics import SHARED_FOLDER
from service.settings import ENV_PREFIX, Settings

logger = logging.getLogger(__name__)

# Between two looks at the engine.
WATCH_SECONDS = 1.0
# What an end may take beyond the time that accepted requests have.
GRACE_SECONDS = 5.0


def supervise(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT, then has every process finish what it accepted. Raises StartFailed."""
    configure_logging(settings, "supervisor")
    with (
        reserve(settings.host, settings.port) as address,
        tempfile.TemporaryDirectory(prefix="care-") as folder,
    ):
        taken = settings.model_copy(update={"port": address.getsockname()[1]})
        asyncio.run(Supervisor(taken, Path(folder)).run())


class Supervisor:
    """The processes of one service; `folder` holds their socket and the numbers behind /metrics."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._metrics = folder / "metrics"
        self._metrics.mkdir()
        self._socket = folder / "engine.sock"
        self._said = False
        self._stop = asyncio.Event()
        # What a killed process leaves behind goes with the folder.
        environment = environment_of(settings) | {SHARED_FOLDER: str(self._metrics), "TMPDIR": str(folder)}
        engine = ["service.engine.process", "--socket", str(self._socket)]
        worker = ["service.worker", *(["--engine", str(self._socket)] if settings.has_engine_process else [])]
        self._engine = (
            Child("engine", engine, environment, settings.start_seconds, on_end=self._forget)
            if settings.has_engine_process
            else None
        )
        self._workers = [
            Child(
                name,
                [*worker, "--name", name],
                environment,
                settings.start_seconds,
                on_ready=self._say_once,
                on_end=self._forget,
            )
            for name in (f"worker {number}" for number in range(1, settings.workers + 1))
        ]

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_asked)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        tasks = [loop.create_task(keeper) for keeper in (self._stop.wait(), *self._keepers())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    def _keepers(self) -> Iterator[Coroutine[Any, Any, None]]:
        if self._engine is not None:
            yield self._engine.keep()
            if self._settings.watchdog_seconds:
                yield self._watch(self._engine)
        for worker in self._workers:
            yield self._keep_worker(worker)

    async def _keep_worker(self, worker: Child) -> None:
        if self._engine is not None:
            await self._engine.ready.wait()
        await worker.keep()

    async def _watch(self, engine: Child) -> None:
        """Kills an engine that does not answer a query in time, or not rightly; its keeper starts another."""
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

    def _say_once(self, text: str) -> None:
        if not self._said:
            self._said = True
            print(text, flush=True)

    def _reload(self) -> None:
        for worker in self._workers:
            worker.send_signal(signal.SIGHUP)

    def _end_asked(self) -> None:
        """At the first signal everyone may finish; whoever asks twice is in a hurry."""
        if self._stop.is_set():
            for child in self._children():
                child.kill()
        self._stop.set()

    async def _end(self) -> None:
        """The workers first: their last requests need the engine."""
        await asyncio.gather(*(worker.end(self._settings.shutdown_seconds + GRACE_SECONDS) for worker in self._workers))
        if self._engine is not None:
            await self._engine.end(GRACE_SECONDS)

    def _children(self) -> list[Child]:
        return [*self._workers, *([self._engine] if self._engine is not None else [])]

    def _forget(self, pid: int) -> None:
        """What a process that ended has counted stays; what it held is gone."""
        for gauge in self._metrics.glob(f"gauge_live*_{pid}.db"):
            gauge.unlink()


def environment_of(settings: Settings) -> dict[str, str]:
    """The environment that gives a process these settings, and this code."""
    own = {}
    for name, value in settings:
        plain = value.get_secret_value() if isinstance(value, SecretStr) else value
        own[f"{ENV_PREFIX}{name}".upper()] = "" if plain is None else str(plain)
    places = [str(Path(service.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    # Queries are medical: nothing about them may leave the machine.
    private = {"ORT_DISABLE_TELEMETRY": "1"}
    return private | os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
