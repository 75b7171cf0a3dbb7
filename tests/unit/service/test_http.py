"""Reading bodies, noticing that a client left, and answering in JSON lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from service.errors import BodyTooLarge, Overloaded
from service.http.asgi import HEADERS, ClientLeft, WhileConnected, read_body, send_lines, wants_lines

pytestmark = pytest.mark.anyio


class Connection:
    """Returns its messages one by one, then waits for the client to leave."""

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
    assert await read_body({HEADERS: {}}, connection.receive, 3) == b"abc"


async def test_a_body_is_refused_by_its_declared_or_its_actual_length() -> None:
    connection = Connection(chunk(b"abcd", more=False))
    with pytest.raises(BodyTooLarge):
        await read_body({HEADERS: {b"content-length": b"4"}}, connection.receive, 3)
    with pytest.raises(BodyTooLarge):
        await read_body({HEADERS: {b"content-length": b"3"}}, connection.receive, 3)


async def test_a_client_that_leaves_within_its_body_raises_client_left() -> None:
    connection = Connection(chunk(b"ab", more=True))
    connection.left.set()
    with pytest.raises(ClientLeft):
        await read_body({HEADERS: {}}, connection.receive, 3)


async def test_work_for_a_client_that_left_is_cancelled() -> None:
    connection, cancelled = Connection(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def handle() -> None:
        with WhileConnected(connection.receive):
            await work()

    task = asyncio.create_task(handle())
    await asyncio.sleep(0)
    connection.left.set()
    with pytest.raises(ClientLeft):
        await task
    assert cancelled.is_set()


async def test_work_that_ends_before_the_client_leaves_is_not_cancelled() -> None:
    connection = Connection()
    with WhileConnected(connection.receive):
        await asyncio.sleep(0)
    connection.left.set()
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_is_passed_on() -> None:
    connection = Connection()

    async def handle() -> None:
        with WhileConnected(connection.receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(handle())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_is_passed_on() -> None:
    connection = Connection()
    with pytest.raises(ValueError, match="mine"), WhileConnected(connection.receive):
        raise ValueError("mine")


async def test_a_block_that_never_waits_starts_no_watcher() -> None:
    async def receive() -> Message:
        raise AssertionError("no message may be received")

    with WhileConnected(receive):
        pass
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ([], False),
        ([(b"accept", b"*/*")], False),
        ([(b"accept", b"application/x-ndjson")], True),
        ([(b"host", b"care"), (b"accept", b"text/event-stream, application/x-ndjson")], True),
        ([(b"accept", b"application/x-ndjson, application/json")], False),
    ],
)
def test_json_lines_are_sent_only_if_nothing_else_is_accepted(headers: list[tuple[bytes, bytes]], wanted: bool) -> None:
    assert wants_lines({HEADERS: dict(headers)}) == wanted


async def sent(lines: AsyncIterator[bytes]) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await send_lines(send, lines, "r1")
    return messages


async def test_lines_are_sent_one_by_one() -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b"1\n"
        yield b"2\n"

    start, *bodies = await sent(lines())
    assert (start["status"], start["headers"]) == (200, [(b"content-type", b"application/x-ndjson")])
    assert [body["body"] for body in bodies] == [b"1\n", b"2\n", b""]
    assert [body.get("more_body", False) for body in bodies] == [True, True, False]


async def test_a_failure_before_the_first_line_is_raised() -> None:
    async def lines() -> AsyncIterator[bytes]:
        raise Overloaded("full")
        yield b""

    with pytest.raises(Overloaded):
        await sent(lines())


@pytest.mark.parametrize(
    ("error", "code", "logged"), [(Overloaded("full"), "overloaded", False), (RuntimeError("secret"), "internal", True)]
)
async def test_a_later_failure_is_sent_as_a_line(
    error: Exception, code: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b"1\n"
        raise error

    *_, failure, end = await sent(lines())
    facts = json.loads(failure["body"])["error"]
    assert (facts["code"], facts["request_id"]) == (code, "r1")
    assert "secret" not in facts["message"]
    assert not end.get("more_body", False)
    assert bool(caplog.records) == logged
