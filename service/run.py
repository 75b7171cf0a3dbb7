"""`serve(settings)`: the service as a process, from its one line of output to a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

import uvicorn
from fastapi import FastAPI

from models.errors import CareError
from service.app import create_app
from service.errors import PortTaken
from service.middleware import access_logger
from service.runtime import Runtime
from service.settings import Settings
from service.wire import TolerantProtocol


def serve(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT, then finishes what it accepted. Raises a CareError if it cannot start."""
    _configure_logging(settings)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=TolerantProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
    loops = config.get_loop_factory()
    with _bind(settings.host, settings.port) as listener, asyncio.Runner(loop_factory=loops) as runner:
        runner.run(_serve(app, config, listener))


class _AnnouncingServer(uvicorn.Server):
    """Says where it listens, once it does."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        (listener,) = sockets or []
        runtime: Runtime = self.config.app.state.runtime  # type: ignore[union-attr]
        print(_announcement(runtime, listener), flush=True)


async def _serve(app: FastAPI, config: uvicorn.Config, listener: socket.socket) -> None:
    # The lifespan is run here and not by uvicorn, so that a snapshot that cannot be opened is an exception with a
    # message and not a traceback in a log.
    async with app.router.lifespan_context(app):
        # uvicorn raises the signal that ended it once more; by default that would kill the process before the drain.
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, lambda number, frame: None)
        await _AnnouncingServer(config).serve(sockets=[listener])


def _announcement(runtime: Runtime, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        serving = runtime.servings.current()
    except CareError as error:
        return f"CARE Search listens at {address} but is not ready: {error}"
    documents = len(serving.snapshot.documents)
    return f"CARE Search is ready at {address} ({documents} documents, snapshot {serving.version})"


def _bind(host: str, port: int) -> socket.socket:
    """The address, taken but not yet listened on: clients are refused, not kept waiting, while the snapshot opens."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host}:{port} ({error.strerror})"
        raise PortTaken(f"{reason}; choose another CARE_HOST or CARE_PORT") from error
    return listener


def _configure_logging(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if settings.access_log:
        lines = logging.StreamHandler(sys.stdout)
        lines.setFormatter(logging.Formatter("%(message)s"))
        access_logger.addHandler(lines)
        access_logger.setLevel(logging.INFO)
        access_logger.propagate = False
