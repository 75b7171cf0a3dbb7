"""The HTTP process: the whole service alone, or one worker of a supervisor (`python -m service.processes.server`)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from models.errors import CareError
from service.http.app import create_app
from service.http.protocol import http_config
from service.processes.startup import StartupMessage, SupervisorPipe, address_of, bind, configure_logging, join
from service.runtime import ALONE, Place, Runtime
from service.settings import Settings

Started = Callable[[str], None]
"""Gets the announcement, once the service listens."""


def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT, then finishes what it accepted. Raises a CareError if it cannot start."""
    configure_logging(settings)
    with bind(settings.host, settings.port) as listener:
        serve_on(listener, settings, lambda line: print(line, flush=True))


def main() -> int:
    """Runs one worker: shares its address with the others, and ends with the supervisor."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="name of this worker in log lines")
    parser.add_argument("--engine", type=Path, help="socket of the engine process, if there is one")
    parser.add_argument("--again", action="store_true", help="it takes the place of a worker that ended")
    arguments = parser.parse_args()
    # A query is tokenised in microseconds; a pool of threads in every worker would only hold memory.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settings = Settings()
    configure_logging(settings, arguments.name)
    pipe = SupervisorPipe.inherited()
    supervisor = os.getppid()

    def end_with_supervisor() -> None:
        pipe.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_supervisor, daemon=True).start()
    place = Place(arguments.engine, lambda: os.kill(supervisor, signal.SIGHUP), arguments.again)
    try:
        with join(settings.host, settings.port) as listener:
            serve_on(listener, settings, lambda line: pipe.send(StartupMessage(ready=True, text=line)), place)
    except CareError as error:
        pipe.send(StartupMessage(ready=False, text=str(error)))
        return 1
    return 0


def serve_on(listener: socket.socket, settings: Settings, started: Started, place: Place = ALONE) -> None:
    """Serves on a bound socket; see `serve`."""
    if not _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    app = create_app(settings, place)
    config = http_config(app, settings)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(app, config, listener, started))


async def _serve(app: FastAPI, config: uvicorn.Config, listener: socket.socket, started: Started) -> None:
    # The lifespan is run here and not by uvicorn, so that a snapshot that cannot be opened is an exception with a
    # message and not a traceback in a log.
    async with app.router.lifespan_context(app):
        # uvicorn raises the signal that ended it once more; by default that would kill the process before the drain.
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, lambda number, frame: None)
        if not _has_terminal():
            _reload_on_sighup(app.state.runtime)
            # The pointer may have moved since it was read, and SIGHUP was ignored until now.
            await app.state.runtime.servings.follow_now()
        await _Server(config, started).serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Announces its address, once it listens; is not ready for a while before it closes its port."""

    def __init__(self, config: uvicorn.Config, started: Started) -> None:
        super().__init__(config)
        self._started = started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Lets load balancers see that it is not ready before it takes no more connections; a second signal ends it."""
        runtime: Runtime = self.config.app.state.runtime  # type: ignore[union-attr]
        if not runtime.settings.drain_seconds or runtime.draining.is_set():
            super().handle_exit(sig, frame)
            return
        runtime.draining.set()
        # A timer of its own: a signal handler must not touch the event loop, which may be asleep.
        timer = threading.Timer(runtime.settings.drain_seconds, super().handle_exit, (sig, frame))
        timer.daemon = True
        timer.start()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        (listener,) = sockets or []
        runtime: Runtime = self.config.app.state.runtime  # type: ignore[union-attr]
        # What exists now stays: without it a collection takes tens of milliseconds less.
        gc.collect()
        gc.freeze()
        # Returns memory that loading left behind: a third of a large tokenizer's, in every worker.
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._started(_announcement(runtime, address_of(listener)))


def _announcement(runtime: Runtime, address: str) -> str:
    try:
        serving = runtime.servings.current()
    except CareError as error:
        return f"CARE Search listens at {address} but is not ready: {error}"
    documents = len(serving.snapshot.documents)
    return f"CARE Search is ready at {address} ({documents} documents, snapshot {serving.version})"


def _has_terminal() -> bool:
    """Whether SIGHUP may mean that the terminal was closed, which ends the service like other programs."""
    return sys.stdin is not None and sys.stdin.isatty()


def _reload_on_sighup(runtime: Runtime) -> None:
    """Reads the pointer at every SIGHUP."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def follow() -> None:
        task = loop.create_task(runtime.servings.follow_now())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, follow)


if __name__ == "__main__":
    sys.exit(main())
