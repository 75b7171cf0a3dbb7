"""Connects a worker to the engine process, and reconnects after the engine restarts.

The link is up once the engine has opened every serving that this worker still answers from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary, finalize

from indexer.errors import BadCollection, BadSnapshot
from indexer.store.snapshot import Snapshot
from models.errors import BadEncoder, CareError, SpaceMismatch
from service.engine.jobs import Request, Response
from service.engine.remote import frames
from service.engine.remote.frames import FrameReader, Kind
from service.errors import EngineAway, EngineFailed
from service.serving.serving import Serving

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.1
# Longest wait for an engine: it may be loading an encoder of gigabytes.
PATIENCE_SECONDS = 120.0
ENDED = "the engine process ended; it is started again"
REFUSALS: dict[str, type[CareError]] = {
    kind.__name__: kind for kind in (BadCollection, BadSnapshot, BadEncoder, SpaceMismatch)
}


class _Connection(asyncio.Protocol):
    """One connection to the engine."""

    def __init__(self, on_body: Callable[[memoryview], None]) -> None:
        self.lost = asyncio.Event()
        self._reader = FrameReader()
        self._on_body = on_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._reader.feed(data):
            self._on_body(body)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set()


@dataclass(slots=True, eq=False)
class _Opened:
    """A serving's name, and its handle in one connection; `is_held` while requests may be answered from it."""

    name: tuple[str, str, str]
    connection: _Connection | None = None
    handle: int | None = None
    is_held: bool = True


class Link:
    """Runs in the event loop; calls `on_response` with every response, and `on_lost` when the connection is lost.

    `on_refused` is awaited if a restarted engine cannot open a serving: its models may have been replaced.
    """

    def __init__(
        self, path: Path, on_response: Callable[[Response], None], on_lost: Callable[[], None],
        on_refused: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._path = path
        self._on_refused = on_refused
        self._on_response = on_response
        self._on_lost = on_lost
        self._up = asyncio.Event()
        self._connection: _Connection | None = None
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        # By snapshot: fresh documents change more often, and the engine does not hold them.
        self._opened: WeakKeyDictionary[Snapshot, _Opened] = WeakKeyDictionary()

    def start(self) -> None:
        """Begins to connect, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._stay_connected())

    def handle_of(self, serving: Serving) -> int | None:
        """Returns the engine's handle of a serving; None while the link is down or if the engine could not open it."""
        opened = self._opened.get(serving.snapshot) if self._up.is_set() else None
        return opened.handle if opened is not None and opened.connection is self._connection else None

    def send(self, request: Request) -> None:
        assert self._connection is not None  # a handle implies a connection
        self._connection.transport.write(frames.write_request(request))

    async def open(self, serving: Serving) -> None:
        """Has the engine open a serving; it stays open until this worker drops its snapshot."""
        try:
            await asyncio.wait_for(self._up.wait(), PATIENCE_SECONDS)
        except TimeoutError:
            raise EngineAway(f"no engine process answered for {PATIENCE_SECONDS:.0f} s") from None
        opened = _Opened(serving.name)
        await self._open(opened)
        self._opened[serving.snapshot] = opened
        finalize(serving.snapshot, self._drop, opened).atexit = False

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            self._connection.transport.close()

    async def _stay_connected(self) -> None:
        while True:
            try:
                _, connection = await self._loop.create_unix_connection(
                    lambda: _Connection(self._receive), str(self._path)
                )
            except OSError:
                await asyncio.sleep(RECONNECT_SECONDS)
                continue
            self._connection = connection
            reopening = self._loop.create_task(self._reopen())
            try:
                await connection.lost.wait()
            finally:
                reopening.cancel()
            self._lose()
            await asyncio.gather(reopening, return_exceptions=True)

    async def _reopen(self) -> None:
        is_refused = False
        for opened in list(self._opened.values()):
            if not opened.is_held:
                continue
            try:
                await self._open(opened)
            except EngineAway:
                return
            except CareError as error:
                logger.error("the engine does not open snapshot %s any more: %s", opened.name[0], error)
                is_refused = True
        self._up.set()
        if is_refused:
            await self._on_refused()

    def _lose(self) -> None:
        self._connection = None
        self._up.clear()
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(EngineAway(ENDED))
        self._on_lost()

    async def _open(self, opened: _Opened) -> None:
        """Has the engine open a serving; releases it again if it was dropped meanwhile."""
        if (connection := self._connection) is None:
            raise EngineAway(ENDED)
        number = next(self._numbers)
        reply: asyncio.Future[int] = self._loop.create_future()
        self._replies[number] = reply
        connection.transport.write(frames.write_control(Kind.OPEN, number, opened.name))
        try:
            opened.connection, opened.handle = connection, await reply
        finally:
            self._replies.pop(number, None)
        if not opened.is_held:
            self._release(opened)

    def _drop(self, opened: _Opened) -> None:
        # The last reference may go in any thread, and after the loop was closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._release, opened)

    def _release(self, opened: _Opened) -> None:
        opened.is_held = False
        # In another connection the same handle may mean another serving.
        if self._connection is not None and opened.connection is self._connection:
            self._connection.transport.write(frames.write_control(Kind.RELEASE, 0, opened.handle))

    def _receive(self, body: memoryview) -> None:
        kind = frames.kind_of(body)
        if kind is Kind.RESPONSE:
            self._on_response(frames.read_response(body))
            return
        number, facts = frames.read_control(body)
        reply = self._replies.get(number)
        if reply is None or reply.done():
            return
        if kind is Kind.OPENED:
            reply.set_result(facts)
        else:
            name, reason = facts
            reply.set_exception(REFUSALS.get(name, EngineFailed)(reason))
