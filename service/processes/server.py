"""HTTP process: the whole service alone, or one worker of a supervisor (`python -m service.processes.server`)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from models.errors import CareError
from service.errors import BadSettings
from service.http.app import create_app
from service.http.protocol import http_config
from service.processes.startup import (
    StartupMessage,
    SupervisorPipe,
    address_of,
    bind,
    configure_logging,
    join,
    listeners,
    with_ports,
)
from service.runtime import ALONE, Place, Runtime
from service.settings import Settings

logger = logging.getLogger(__name__)

Started = Callable[[str], None]
"""Gets the announcement, once the service listens."""


def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT, then finishes what it accepted. Raises a CareError if it cannot start."""
    configure_logging(settings)
    with listeners(settings, bind) as taken:
        serve_on(taken, with_ports(settings, taken), lambda line: print(line, flush=True))


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
        with listeners(settings, join) as taken:
            serve_on(taken, settings, lambda line: pipe.send(StartupMessage(ready=True, text=line)), place)
    except CareError as error:
        pipe.send(StartupMessage(ready=False, text=str(error)))
        return 1
    return 0


def serve_on(taken: list[socket.socket], settings: Settings, started: Started, place: Place = ALONE) -> None:
    """Serves on bound sockets, the first of which is announced; see `serve`."""
    if not _has_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    app = create_app(settings, place)
    config = http_config(app, settings)
    _load_certificates(config)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(app, config, taken, started))


def _load_certificates(config: uvicorn.Config) -> None:
    """Has uvicorn read the files of TLS now, where an error has a message of its own."""
    if not config.is_ssl:
        return
    try:
        _require_pair(config)
        config.load()
    except OSError as error:  # of which ssl's errors are some
        names = ", ".join(filter(None, map(str, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs or ""))))
        raise BadSettings(f"the files of TLS cannot be used ({error}): {names}; see CARE_TLS_CERT") from error


def _require_pair(config: uvicorn.Config) -> None:
    """Raises OSError if the certificate and its key cannot be used together."""
    pair = str(config.ssl_certfile), config.ssl_keyfile
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*pair, _refuse_encrypted)


def _refuse_encrypted() -> str:
    """Stands for OpenSSL's prompt at the terminal, which stops the event loop."""
    raise OSError("the key is encrypted; decrypt it with openssl pkey")


async def _serve(app: FastAPI, config: uvicorn.Config, taken: list[socket.socket], started: Started) -> None:
    server = _Server(config, started)
    # The lifespan is run here and not by uvicorn, so that a snapshot that cannot be opened is an exception with a
    # message and not a traceback in a log.
    async with app.router.lifespan_context(app):
        # uvicorn takes these signals only while it serves. One that comes before must not be lost; and the one that
        # ended it, which it raises once more, would by default kill the process before the drain.
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, server.handle_exit)
        if not _has_terminal():
            _reload_on_sighup(app.state.runtime, config)
            # The pointer may have moved since it was read, and SIGHUP was ignored until now.
            await app.state.runtime.servings.follow_now()
        await server.serve(sockets=taken)


class _Server(uvicorn.Server):
    """Announces its address, once it listens; is not ready for a while before it closes its port."""

    def __init__(self, config: uvicorn.Config, started: Started) -> None:
        super().__init__(config)
        self._started = started

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Fails /readyz for a while before it stops accepting connections; a second signal ends it at once."""
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
        listener, *_ = sockets or []
        runtime: Runtime = self.config.app.state.runtime  # type: ignore[union-attr]
        # What exists now stays: without it a collection takes tens of milliseconds less.
        gc.collect()
        gc.freeze()
        # Returns memory that loading left behind: a third of a large tokenizer's, in every worker.
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._started(_announcement(runtime, address_of(listener, "https" if self.config.is_ssl else "http")))


def _announcement(runtime: Runtime, address: str) -> str:
    try:
        serving = runtime.servings.current()
    except CareError as error:
        return f"CARE Search listens at {address} but is not ready: {error}"
    documents = len(serving.snapshot.documents)
    return f"CARE Search is ready at {address} ({documents} documents, snapshot {serving.version})"


def _has_terminal() -> bool:
    """Returns whether SIGHUP may mean that the terminal was closed, which ends the service like other programs."""
    return sys.stdin is not None and sys.stdin.isatty()


def _reload_on_sighup(runtime: Runtime, config: uvicorn.Config) -> None:
    """Reads the pointer, the keys and the certificate at every SIGHUP."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def follow() -> None:
        runtime.keys.reload()
        if config.ssl is not None and config.ssl_certfile is not None:
            try:
                # Elsewhere first: a key that does not fit is noticed when its certificate is already in force.
                _require_pair(config)
                config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
            except OSError as error:
                logger.error("the certificate stays as it was: %s", error)
        task = loop.create_task(runtime.servings.follow_now())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, follow)


if __name__ == "__main__":
    sys.exit(main())
