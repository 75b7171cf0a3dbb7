"""The few pieces of HTTP that the lean routes need: read a body, notice that a client left, send bytes or lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from http import HTTPStatus
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive, Scope, Send

from service.errors import INTERNAL, BodyTooLarge, ErrorAnswer, InvalidRequest, answer_for

logger = logging.getLogger(__name__)

JSON = (b"content-type", b"application/json")
LINES = (b"content-type", b"application/x-ndjson")


class ClientLeft(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, refused as soon as it is known to be larger than `limit` bytes."""
    too_large = f"the body is larger than {limit} bytes; send less at a time"
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise BodyTooLarge(too_large)
        if name == b"content-encoding" and value.lower() != b"identity":
            raise InvalidRequest("body", "is compressed (Content-Encoding), which is not read here; send it plain")
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(too_large)
        if not message.get("more_body", False):
            return body


class WhileConnected:
    """Cancels the block as soon as the client leaves, which then raises ClientLeft.

    To be entered once the body was read: the next message of the connection can only be its end. A block that never
    waits, such as one that finds its answer in the cache, is not watched, and costs nothing.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Future[Message] | None = None
        self._left = False
        self._over = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # a coroutine that awaits runs in a task
        self._task = task
        self._first_wait = asyncio.get_running_loop().call_soon(self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._first_wait.cancel()
        if self._watch is not None:
            self._watch.cancel()
        # As in asyncio.timeout: only the cancellation that was made here becomes another exception.
        if self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientLeft from error

    def _begin(self) -> None:
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(self._end)

    def _end(self, watch: asyncio.Future[Message]) -> None:
        if not self._over:
            self._left = True
            self._task.cancel()


def closing_answer(answer: ErrorAnswer, request_id: str) -> bytes:
    """Returns an error as it goes over the wire, for a request that the application never sees."""
    body = answer.body(request_id)
    own = [(b"content-length", b"%d" % len(body)), (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    lines = [b"%b: %b" % pair for pair in (JSON, *answer.header_pairs(), *own)]
    status = b"HTTP/1.1 %d %b" % (answer.status, HTTPStatus(answer.status).phrase.encode())
    return b"\r\n".join([status, *lines, b"", body])


async def send_bytes(send: Send, body: bytes, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends a JSON body that is complete already."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


def wants_lines(scope: Scope) -> bool:
    """Whether the client asks for JSON lines: it names them, and does not name plain JSON beside them."""
    for name, value in scope["headers"]:
        if name == b"accept" and LINES[1] in value:
            return JSON[1] not in value
    return False


async def send_lines(send: Send, lines: AsyncIterator[bytes], request_id: str) -> None:
    """Sends lines as they come.

    What fails before the first line is raised, and so an error like any other; what fails later, when the status is
    out, is a line with the error, and the last one.
    """
    first = await anext(lines)
    await send({"type": "http.response.start", "status": 200, "headers": [LINES]})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    try:
        async for line in lines:
            await send({"type": "http.response.body", "body": line, "more_body": True})
    except Exception as error:
        answer = answer_for(error)
        if answer.status == INTERNAL[0]:
            logger.exception("request %s failed after its first line", request_id)
        await send({"type": "http.response.body", "body": answer.body(request_id) + b"\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})
