"""The service as one process: from the line that says it is ready to a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from models.errors import CareError
from service.http.app import create_app
from service.http.protocol import http_config
from service.listener import address_of, bind
from service.logs import configure_logging
from service.runtime import ALONE, Place, Runtime
from service.settings import Settings

Started = Callable[[str], None]
"""Hears the line that says where the service listens, once it does."""


def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT, then finishes what it accepted. Raises a CareError if it cannot start."""
    configure_logging(settings)
    with bind(settings.host, settings.port) as listener:
        serve_on(listener, settings, lambda line: print(line, flush=True))


def serve_on(listener: socket.socket, settings: Settings, started: Started, place: Place = ALONE) -> None:
    """As `serve`, on an address that is taken already."""
    if not _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    app = create_app(settings, place)
    config = http_config(app, settings)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(app, config, listener, started))


class _AnnouncingServer(uvicorn.Server):
    """Says where it listens, once it does."""

    def __init__(self, config: uvicorn.Config, started: Started) -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        (listener,) = sockets or []
        runtime: Runtime = self.config.app.state.runtime  # type: ignore[union-attr]
        # What was made until now stays. The collector need not look at it again, which takes it tens of milliseconds.
        gc.collect()
        gc.freeze()
        _give_back_memory()
        self._started(_announcement(runtime, address_of(listener)))


def _give_back_memory() -> None:
    """Lets go of what loading left behind: of a large tokenizer a third of its memory, in every worker."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


async def _serve(app: FastAPI, config: uvicorn.Config, listener: socket.socket, started: Started) -> None:
    # The lifespan is run here and not by uvicorn, so that a snapshot that cannot be opened is an exception with a
    # message and not a traceback in a log.
    async with app.router.lifespan_context(app):
        # uvicorn raises the signal that ended it once more; by default that would kill the process before the drain.
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, lambda number, frame: None)
        if not _has_terminal():
            _follow_when_told(app.state.runtime)
            # The pointer may have moved since it was read, and SIGHUP was ignored until now.
            await app.state.runtime.servings.follow_now()
        await _AnnouncingServer(config, started).serve(sockets=[listener])


def _has_terminal() -> bool:
    """Whether SIGHUP may mean that a terminal was closed, with which the service ends as other programs do."""
    return sys.stdin is not None and sys.stdin.isatty()


def _follow_when_told(runtime: Runtime) -> None:
    """Looks at the pointer whenever SIGHUP says that it was moved."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def follow() -> None:
        task = loop.create_task(runtime.servings.follow_now())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, follow)


def _announcement(runtime: Runtime, address: str) -> str:
    try:
        serving = runtime.servings.current()
    except CareError as error:
        return f"CARE Search listens at {address} but is not ready: {error}"
    documents = len(serving.snapshot.documents)
    return f"CARE Search is ready at {address} ({documents} documents, snapshot {serving.version})"
