"""Routes in plain ASGI: GET and POST /v1/search, and any route from JSON to JSON.

Bodies in, answers out: read, notice that a client left, send bytes or lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import Message, Receive, Scope, Send

from service.errors import INTERNAL, BodyTooLarge, ErrorResponse, InvalidRequest, answer_for, invalid_request
from service.search.request import SearchRequest, parse_query_string, require_few_parts

if TYPE_CHECKING:
    from service.runtime import Runtime
    from service.serving.serving import Serving

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

SEARCH_PATH = "/v1/search"
SEARCH_METHODS = ["GET", "POST"]
# In the scope of a request:
KEY = "care.key"  # the caller's key
HEADERS = "care.headers"  # headers as a dictionary: of those that repeat, the last one
REQUEST_ID = "care.request_id"
QUERIES = "care.queries"  # for the access log, if it shows them
SEARCH = "care.search"  # a search as it was parsed
TIMINGS = "care.timings"  # and the time of its stages
JSON = (b"content-type", b"application/json")
LINES = (b"content-type", b"application/x-ndjson")
IDENTITY = b"identity"
BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
COMPRESSED = "is compressed, which is not read here"
ERRORS = {
    401: "No key, or one that is not in force",
    403: "The key lacks the scope",
    404: "No such document or model",
    408: "The request took too long to arrive",
    409: "The snapshot was refused, and the one in service stays; or it is time to re-index; or an id is taken",
    413: "Body too large",
    422: "A field of the request is wrong",
    429: "Too many queries are waiting, or the key is beyond its rate: see Retry-After",
    503: "Nothing is served, or the engine failed: see Retry-After",
    504: "The time for this request was over before the answer was there",
}


class ErrorFacts(BaseModel):
    """What went wrong, for a program (`code`) and for a person (`message`)."""

    code: str
    message: str
    field: str | None = None
    request_id: str


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorFacts


class ClientLeft(Exception):
    """The client closed the connection, so nothing can be answered."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for FastAPI's `responses`."""
    return {status: {"model": ErrorAnswer, "description": ERRORS[status]} for status in statuses}


def runtime_of(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Reads the whole body; refuses it as soon as it is known to be larger than `limit` bytes."""
    headers: dict[bytes, bytes] = scope[HEADERS]
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    if headers.get(b"content-encoding", IDENTITY).lower() != IDENTITY:
        raise InvalidRequest("body", f"{COMPRESSED}; send it plain and without the header Content-Encoding")
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return body


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes; send less at a time")


def parse_body(model: type[Model], body: bytes, most: int) -> Model:
    """Parses a JSON body whose lists may hold `most` elements; an error names the wrong field."""
    body = body.removeprefix(BOM)
    try:
        require_few_parts(body, most)
        return model.model_validate_json(body, strict=True)
    except InvalidRequest:
        _require_text(body)
        raise
    except ValidationError as error:
        _require_text(body)
        raise invalid_request(error, model) from None


def _require_text(body: bytes) -> None:
    """Raises InvalidRequest if the body is not UTF-8: no parser says so in plain words."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        fault = f"{COMPRESSED}; send it plain" if body.startswith(GZIP) else "is not UTF-8; convert it"
        raise InvalidRequest("body", fault) from None


class SearchRoute:
    """The ASGI endpoint of a search."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime: Runtime = scope["app"].state.runtime
        settings = runtime.settings
        body = await read_body(scope, receive, settings.max_body_bytes)
        if scope["method"] == "POST":
            if scope["query_string"]:
                raise InvalidRequest(
                    "body", "holds all that a POST asks for; move what is behind the ? of the URL there"
                )
            request = parse_body(SearchRequest, body, max(settings.max_stream_queries, settings.max_filter_values))
        else:
            request = parse_query_string(scope["query_string"])
        if settings.log_queries:
            scope[QUERIES] = request.queries
        scope[SEARCH] = request
        serving = runtime.servings.current()
        if wants_lines(scope):
            stream = runtime.searcher.stream(serving, request, scope[KEY])
            with WhileConnected(receive):
                async with aclosing(stream) as lines:
                    await send_lines(send, lines, scope[REQUEST_ID])
            return
        with WhileConnected(receive):
            body, timings = await runtime.searcher.search(serving, request, scope[KEY])
        scope[TIMINGS] = timings
        await send_bytes(send, body, headers=[(b"server-timing", timings.as_server_timing())])


class JsonRoute(Generic[Model]):
    """An ASGI endpoint that takes a JSON body and answers with bytes of JSON."""

    def __init__(
        self, model: type[Model], answer: Callable[[Runtime, Serving, Model, bytes], Awaitable[bytes]]
    ) -> None:
        """`answer` also gets the tenant of the request's key."""
        self._model = model
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime: Runtime = scope["app"].state.runtime
        settings = runtime.settings
        request = parse_body(self._model, await read_body(scope, receive, settings.max_body_bytes), settings.max_texts)
        serving = runtime.servings.current()
        with WhileConnected(receive):
            answer = await self._answer(runtime, serving, request, scope[KEY].tenant)
        await send_bytes(send, answer)


class WhileConnected:
    """Cancels the block as soon as the client leaves; the block then raises ClientLeft.

    Enter it after the body was read: the next message of the connection can only be its end. A block that never
    waits, such as one with a cached answer, is not watched and costs nothing.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Future[Message] | None = None
        self._left = False
        self._over = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None  # a coroutine that awaits runs in a task
        self._task = task
        self._first_wait = asyncio.get_running_loop().call_soon(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._first_wait.cancel()
        if self._watch is not None:
            self._watch.cancel()
        # As in asyncio.timeout: only the cancellation made here becomes another exception.
        if self._left and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientLeft from error

    def _begin(self) -> None:
        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(self._end)

    def _end(self, watch: asyncio.Future[Message]) -> None:
        if not self._over:
            self._left = True
            self._task.cancel()


def closing_answer(answer: ErrorResponse, request_id: str) -> bytes:
    """Writes an error as raw HTTP, for a request that the application never sees."""
    body = answer.body(request_id)
    own = [(b"content-length", b"%d" % len(body)), (b"x-request-id", request_id.encode()), (b"connection", b"close")]
    lines = [b"%b: %b" % pair for pair in (JSON, *answer.header_pairs(), *own)]
    status = b"HTTP/1.1 %d %b" % (answer.status, HTTPStatus(answer.status).phrase.encode())
    return b"\r\n".join([status, *lines, b"", body])


async def send_bytes(send: Send, body: bytes, status: int = 200, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends a complete JSON body."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON, length, *headers]})
    await send({"type": "http.response.body", "body": body})


def wants_lines(scope: Scope) -> bool:
    """Whether the client accepts JSON lines, and not plain JSON beside them."""
    accepted: bytes | None = scope[HEADERS].get(b"accept")
    return accepted is not None and LINES[1] in accepted and JSON[1] not in accepted


async def send_lines(send: Send, lines: AsyncIterator[bytes], request_id: str) -> None:
    """Sends lines as they come.

    An error before the first line is raised. A later one, when the status is out, becomes the last line.
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
