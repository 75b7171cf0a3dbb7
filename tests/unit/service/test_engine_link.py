"""A worker's connection to the engine, over a real socket to an engine that the test scripts."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.engine.remote import frames
from service.engine.remote.frames import FrameReader, Kind
from service.engine.remote.link import Link
from service.serving.serving import Serving

pytestmark = pytest.mark.anyio

WAIT_SECONDS = 60.0


class Snapshot:
    """A snapshot that a link references weakly."""


def serving(version: str) -> Serving:
    return cast(Serving, SimpleNamespace(version=version, name=(version, "print", ""), snapshot=Snapshot()))


class Engine:
    """A sequence of engine processes, each of which numbers its handles from 1."""

    def __init__(self) -> None:
        self.refusals = 0
        self.reloaded = asyncio.Event()
        self.reloaded.set()
        self._serving: set[Any] = set()
        self._received: asyncio.Queue[tuple[Kind, int, Any]] = asyncio.Queue()
        self._connections: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        self._connections.put_nowait(writer)
        pieces = FrameReader()
        while data := await reader.read(65536):
            for body in pieces.feed(data):
                self._received.put_nowait((frames.kind_of(body), *frames.read_control(body)))
        writer.close()
        await writer.wait_closed()

    async def end(self) -> None:
        """Waits until every connection is closed."""
        await asyncio.wait_for(asyncio.gather(*self._serving), WAIT_SECONDS)

    async def begin(self) -> None:
        self._writer = await asyncio.wait_for(self._connections.get(), WAIT_SECONDS)

    def die(self) -> None:
        self._writer.close()

    async def receive(self) -> tuple[Kind, int, Any]:
        return await asyncio.wait_for(self._received.get(), WAIT_SECONDS)

    def grant(self, number: int, handle: int) -> None:
        self._writer.write(frames.write_control(Kind.OPENED, number, handle))

    def refuse(self, number: int, reason: str) -> None:
        self._writer.write(frames.write_control(Kind.REFUSED, number, ("BadEncoder", reason)))

    async def open(self, link: Link, asked: Serving, handle: int) -> None:
        opening = asyncio.create_task(link.open(asked))
        kind, number, facts = await self.receive()
        assert (kind, facts[0]) == (Kind.OPEN, asked.version)
        self.grant(number, handle)
        await asyncio.wait_for(opening, WAIT_SECONDS)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine()
    async with await asyncio.start_unix_server(made.serve, tmp_path / "engine.sock"):
        yield made
        await made.end()


@pytest.fixture
async def link(tmp_path: Path, engine: Engine) -> AsyncIterator[Link]:
    async def refused() -> None:
        engine.refusals += 1
        await engine.reloaded.wait()

    made = Link(tmp_path / "engine.sock", lambda response: None, lambda: None, refused)
    made.start()
    await engine.begin()
    yield made
    await made.close()


async def drop_last_reference(held: list[Serving]) -> None:
    """Drops the last reference, and lets the event loop run what follows from it."""
    held.clear()
    gc.collect()
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_handle_of_a_dead_engine_is_not_released_in_the_new_one(engine: Engine, link: Link) -> None:
    kept, gone = serving("kept"), [serving("gone")]
    await engine.open(link, kept, 1)
    await engine.open(link, gone[0], 2)
    engine.die()
    await engine.begin()
    kind, number, facts = await engine.receive()
    assert (kind, facts[0]) == (Kind.OPEN, "kept")
    await drop_last_reference(gone)
    engine.grant(number, 2)  # the handle that the other serving had before
    later = serving("later")
    await engine.open(link, later, 3)  # nothing was sent before it
    assert link.handle_of(kept) == 2
    assert link.handle_of(later) == 3


async def test_a_serving_dropped_while_it_is_reopened_is_released(engine: Engine, link: Link) -> None:
    gone = [serving("gone")]
    await engine.open(link, gone[0], 1)
    engine.die()
    await engine.begin()
    kind, number, _ = await engine.receive()
    assert kind is Kind.OPEN
    await drop_last_reference(gone)
    engine.grant(number, 7)
    assert await engine.receive() == (Kind.RELEASE, 0, 7)


async def test_a_restarted_engine_that_cannot_reopen_a_serving_is_reported(engine: Engine, link: Link) -> None:
    replaced, kept = serving("replaced"), serving("kept")
    await engine.open(link, replaced, 1)
    await engine.open(link, kept, 2)
    engine.die()
    await engine.begin()
    _, number, _ = await engine.receive()
    engine.refuse(number, "the encoder changed")
    _, number, _ = await engine.receive()
    engine.grant(number, 1)
    await engine.open(link, serving("later"), 2)
    assert (link.handle_of(replaced), link.handle_of(kept)) == (None, 1)
    assert engine.refusals == 1


async def test_a_hanging_reload_does_not_keep_the_link_from_the_next_engine(engine: Engine, link: Link) -> None:
    kept = serving("kept")
    await engine.open(link, kept, 1)
    engine.reloaded.clear()
    for _ in range(2):
        engine.die()
        await engine.begin()
        _, number, _ = await engine.receive()
        engine.refuse(number, "the encoder changed")
        await engine.open(link, serving("later"), 2)
    assert engine.refusals == 2
