"""The few pieces of HTTP that the lean routes need: read a body, notice that a client left, send bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from starlette.types import Message, Receive, Scope, Send

from service.errors import BodyTooLarge

JSON = (b"content-type", b"application/json")


class ClientLeft(Exception):
    """The client closed the connection; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body, refused as soon as it is known to be larger than `limit` bytes."""
    too_large = f"the body is larger than {limit} bytes; send fewer queries at a time"
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise BodyTooLarge(too_large)
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

    To be entered once the body was read: the next message of the connection can only be its end.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = False
        self._over = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # a coroutine that awaits runs in a task
        self._task = task
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(self._end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._watch.cancel()
        # As in asyncio.timeout: only the cancellation that was made here becomes another exception.
        if self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientLeft from error

    def _end(self, watch: asyncio.Future[Message]) -> None:
        if not self._over:
            self._left = True
            self._task.cancel()


async def send_bytes(send: Send, body: bytes, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends a JSON body that is complete already."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})
