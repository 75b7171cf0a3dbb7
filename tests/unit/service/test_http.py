"""Reading bodies and noticing that a client left."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from service.errors import BodyTooLarge
from service.http import ClientLeft, WhileConnected, read_body

pytestmark = pytest.mark.anyio


class Connection:
    """Gives its messages one by one, then waits for the client to leave."""

    def __init__(self, *messages: Message) -> None:
        self._messages = list(messages)
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}


def chunk(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_pieces_is_put_together() -> None:
    connection = Connection(chunk(b"ab", more=True), chunk(b"", more=True), chunk(b"c", more=False))
    assert await read_body({"headers": []}, connection.receive, 3) == b"abc"


async def test_a_body_is_refused_at_its_declared_length_or_at_its_real_one() -> None:
    connection = Connection(chunk(b"abcd", more=False))
    with pytest.raises(BodyTooLarge):
        await read_body({"headers": [(b"content-length", b"4")]}, connection.receive, 3)
    with pytest.raises(BodyTooLarge):
        await read_body({"headers": [(b"content-length", b"3")]}, connection.receive, 3)


async def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    connection = Connection(chunk(b"ab", more=True))
    connection.left.set()
    with pytest.raises(ClientLeft):
        await read_body({"headers": []}, connection.receive, 3)


async def test_work_for_a_client_that_left_is_cancelled() -> None:
    connection, cancelled = Connection(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def handle() -> None:
        async with WhileConnected(connection.receive):
            await work()

    task = asyncio.create_task(handle())
    await asyncio.sleep(0)
    connection.left.set()
    with pytest.raises(ClientLeft):
        await task
    assert cancelled.is_set()


async def test_work_that_ends_in_time_is_not_touched() -> None:
    connection = Connection()
    async with WhileConnected(connection.receive):
        await asyncio.sleep(0)
    connection.left.set()
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_stays_one() -> None:
    connection = Connection()

    async def handle() -> None:
        async with WhileConnected(connection.receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(handle())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_comes_through() -> None:
    connection = Connection()
    with pytest.raises(ValueError, match="mine"):
        async with WhileConnected(connection.receive):
            raise ValueError("mine")
