"""The app behind uvicorn on a real socket, in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from service.http.app import create_app
from service.http.protocol import http_config
from service.processes.startup import bind, listeners, port_of, with_ports
from service.settings import Settings

START_SECONDS = 60


@contextlib.contextmanager
def live(settings: Settings) -> Iterator[str]:
    """Yields the address of a server that runs as under `care serve`."""
    with live_ports(settings) as (address, *_):
        yield address


@contextlib.contextmanager
def live_ports(settings: Settings) -> Iterator[list[str]]:
    """Yields the addresses on free ports: the public one, then that of administrators if it is set."""
    own = {"port": 0, "admin_port": None if settings.admin_port is None else 0}
    with listeners(settings.model_copy(update=own), bind) as taken:
        settings = with_ports(settings, taken)
        app = create_app(settings)
        server = uvicorn.Server(http_config(app, settings))
        ready = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(_serve(app, server, taken, ready))
            except BaseException as error:
                failure.append(error)
                ready.set()

        thread = threading.Thread(target=run, name="live-server")
        thread.start()
        try:
            assert ready.wait(START_SECONDS)
            assert not failure, failure
            scheme = "http" if settings.tls_cert is None else "https"
            yield [f"{scheme}://127.0.0.1:{port_of(each)}" for each in taken]
        finally:
            server.should_exit = True
            thread.join()
    assert not failure, failure


async def _serve(app: FastAPI, server: uvicorn.Server, taken: list[socket.socket], ready: threading.Event) -> None:
    async with app.router.lifespan_context(app):
        serving = asyncio.create_task(server.serve(sockets=taken))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready.set()
        await serving


def rest_of(connection: socket.socket) -> bytes:
    """Reads everything until the server closes the connection."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received
