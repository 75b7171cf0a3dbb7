"""A worker's connection to the engine process: kept up, and made again whenever the engine comes back.

A link is up once the engine has opened every serving that this worker still answers from. Knows frames, not jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary, finalize

from indexer.errors import BadCollection, BadSnapshot
from indexer.store.snapshot import Snapshot
from models.errors import BadEncoder, CareError, SpaceMismatch
from service.engine import frames
from service.engine.frames import Answer, Ask, FrameReader, Kind
from service.errors import EngineAway, EngineFailed
from service.serving import Serving

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.1
# How long a serving waits for an engine that is not there: it may be loading an encoder of gigabytes.
PATIENCE_SECONDS = 120.0
REFUSALS: dict[str, type[CareError]] = {
    kind.__name__: kind for kind in (BadCollection, BadSnapshot, BadEncoder, SpaceMismatch)
}


@dataclass(slots=True, eq=False)
class _Opened:
    """A serving by its name, and its handle, which is good for one connection only.

    `is_held`: a request may still be answered from it.
    """

    name: tuple[str, str]
    wire: _Wire | None = None
    handle: int | None = None
    is_held: bool = True


class Link:
    """Lives in the event loop. `on_answer` gets every answer; `on_lost` hears that there will be no more of them."""

    def __init__(self, path: Path, on_answer: Callable[[Answer], None], on_lost: Callable[[], None]) -> None:
        self._path = path
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._up = asyncio.Event()
        self._wire: _Wire | None = None
        self._numbers = count(1)
        self._replies: dict[int, asyncio.Future[Any]] = {}
        # By snapshot: the engine knows nothing of what lies over it, which changes more often.
        self._opened: WeakKeyDictionary[Snapshot, _Opened] = WeakKeyDictionary()

    def start(self) -> None:
        """Begins to connect, in the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._stay_connected())

    def handle_of(self, serving: Serving) -> int | None:
        """The engine's name for a serving; None while the link is down or the engine could not open it."""
        opened = self._opened.get(serving.snapshot) if self._up.is_set() else None
        return opened.handle if opened is not None and opened.wire is self._wire else None

    def send(self, ask: Ask) -> None:
        assert self._wire is not None  # who has a handle has a wire
        self._wire.transport.write(frames.write_ask(ask))

    async def open(self, serving: Serving) -> None:
        """Has the engine open a serving, which stays open until this worker lets go of it."""
        try:
            await asyncio.wait_for(self._up.wait(), PATIENCE_SECONDS)
        except TimeoutError:
            raise EngineAway(f"no engine process answered for {PATIENCE_SECONDS:.0f} s") from None
        opened = _Opened((serving.version, serving.encoder.fingerprint))
        await self._open(opened)
        self._opened[serving.snapshot] = opened
        finalize(serving.snapshot, self._let_go, opened).atexit = False

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._wire is not None:
            self._wire.transport.close()

    async def _stay_connected(self) -> None:
        while True:
            try:
                _, wire = await self._loop.create_unix_connection(lambda: _Wire(self._received), str(self._path))
            except OSError:
                await asyncio.sleep(RECONNECT_SECONDS)
                continue
            self._wire = wire
            reopening = self._loop.create_task(self._reopen())
            await wire.lost.wait()
            self._lose()
            await asyncio.gather(reopening, return_exceptions=True)

    async def _reopen(self) -> None:
        for opened in list(self._opened.values()):
            if not opened.is_held:
                continue
            try:
                await self._open(opened)
            except EngineAway:
                return
            except CareError as error:
                logger.error("the engine does not open snapshot %s any more: %s", opened.name[0], error)
        self._up.set()

    def _lose(self) -> None:
        self._wire = None
        self._up.clear()
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            if not reply.done():
                reply.set_exception(EngineAway("the engine process ended; it is started again"))
        self._on_lost()

    async def _open(self, opened: _Opened) -> None:
        """Has the engine open a serving; one that was let go of meanwhile is released again."""
        if (wire := self._wire) is None:
            raise EngineAway("the engine process ended; it is started again")
        number = next(self._numbers)
        reply: asyncio.Future[int] = self._loop.create_future()
        self._replies[number] = reply
        wire.transport.write(frames.write_control(Kind.OPEN, number, opened.name))
        try:
            opened.wire, opened.handle = wire, await reply
        finally:
            self._replies.pop(number, None)
        if not opened.is_held:
            self._release(opened)

    def _let_go(self, opened: _Opened) -> None:
        # The last reference to a serving may go in any thread, and when all is over.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._release, opened)

    def _release(self, opened: _Opened) -> None:
        opened.is_held = False
        # A handle of another connection is another serving's name in this engine.
        if self._wire is not None and opened.wire is self._wire:
            self._wire.transport.write(frames.write_control(Kind.RELEASE, 0, opened.handle))

    def _received(self, body: memoryview) -> None:
        kind = frames.kind_of(body)
        if kind is Kind.ANSWER:
            self._on_answer(frames.read_answer(body))
            return
        number, facts = frames.read_control(body)
        reply = self._replies.get(number)
        if reply is None or reply.done():
            return
        if kind is Kind.OPENED:
            reply.set_result(facts)
        else:
            name, said = facts
            reply.set_exception(REFUSALS.get(name, EngineFailed)(said))


class _Wire(asyncio.Protocol):
    """One connection, from its first byte to its last."""

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
