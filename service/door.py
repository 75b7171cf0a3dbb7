"""The door of the hot path: searches come in, or are refused on the spot, as bytes: no parser or task is spent on them.

Refusing must not take the time of answering. Who came in and was not answered yet is counted here: many may come in one
turn of the event loop, long before the first of them reaches the engine's queue, and answers take their time too.
Where answers are cached, those that were given lately are known by the bytes that asked for them, and come in always.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from models.errors import CareError
from service.api import search
from service.errors import ErrorAnswer, Overloaded, answer_for
from service.http import written
from service.middleware import REQUEST_ID, STATUS, UNMATCHED, RequestFrame

# Who takes longer than this waits for something else than the engine, and keeps nobody out.
MEMORY_SECONDS = 0.05
# How long nobody else is let in after a refusal: asking for room is half of what a refusal costs.
SHUT_SECONDS = 0.0005
# So many of the requests that were answered last are let in whatever the load, for a cache should know the answer.
KNOWN_REQUESTS = 8192
# The head of a search whose end is known. Of chunks, or of a client that waits to be told to go on, only a parser can
# know more.
LINES = rb"(?:(?!Content-Length|Transfer-Encoding|Expect|Upgrade)[\w-]+:[^\r\n]*\r\n)*"
HEAD = re.compile(
    rb"(POST|GET) %b(?:\?[^ \r\n]*)? HTTP/1\.1\r\n%b(?:Content-Length: *(\d{1,5})\r\n%b)?\r\n"
    % (search.PATH.encode(), LINES, LINES),
    re.IGNORECASE,
)
# A larger body may hold many queries, which wait in a lane of their own: it is looked at, where all of it is here.
SHORT_BYTES = 999
OWN_LANE = re.compile(rb'"query"\s*:\s*\[|"bulk"\s*:\s*true')
OWN_ID = re.compile(rb"\r\nX-Request-Id: *([^\r\n]*)", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nConnection:[^\r\n]*close", re.IGNORECASE)
CONTENT = "care.content"
NO_METHOD = "-"


class Refused(NamedTuple):
    """The whole answer to a request of so many bytes; `close`: its connection ends with it."""

    answer: bytes
    size: int
    close: bool


class Door:
    """An ASGI application around the search route."""

    def __init__(self, app: RequestFrame, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        """`state` is the application's, where its runtime will be found."""
        self._clock = clock
        self._app = app
        self._state = state
        self._said: ErrorAnswer | None = None
        self._shut_until = 0.0
        self._unasked = 0
        self._inside: dict[int, float] = {}  # since when, the oldest first, by the scope's identity
        self._coming: int | None = None
        self._answered: dict[int, None] = {}  # contents, the latest last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside.pop(id(scope), None)
            if (content := scope.get(CONTENT)) is not None:
                self._learn(content, scope.get(STATUS))

    def refuse(self, data: bytes) -> Refused | None:
        """What becomes of a search that is not let in; `data` begins with a request. None: let it be parsed."""
        self._coming = None
        head = HEAD.match(data)
        if head is None:
            return None
        method, length = head.groups()
        size = head.end() + int(length or 0)
        if size > head.end() + SHORT_BYTES and (len(data) < size or OWN_LANE.search(data, head.end(), size)):
            return None
        if self._state.runtime.searcher.remembers and len(data) >= size:
            self._coming = hash((data[: data.index(b"\r")], data[head.end() : size]))
        overloaded = self._overloaded()
        if overloaded is None or self._coming in self._answered:
            return None
        own_id, close = OWN_ID.search(data, 0, head.end()), CLOSE.search(data, 0, head.end()) is not None
        answer = self._app.refuse(overloaded, method.decode(), search.PATH, own_id and own_id[1], close=close)
        return Refused(answer, size, close)

    def turn_away(self, error: CareError, scope: Scope | None) -> bytes:
        """The answer to bytes that are no request, or not all of one: then `scope` is that of what there is."""
        answer = answer_for(error)
        if scope is None:
            return self._app.refuse(answer, NO_METHOD, UNMATCHED, None, close=True)
        scope[STATUS] = answer.status  # which its route, where it waits for the rest, accounts for
        return written(answer, scope.get(REQUEST_ID) or secrets.token_hex(8), close=True)

    def enter(self, scope: Scope) -> None:
        """Counts a search that comes in until it is answered, or a while; it is the one that was not refused last."""
        if is_search(scope):
            self._inside[id(scope)] = self._clock()
            scope[CONTENT], self._coming = self._coming, None

    def _overloaded(self) -> ErrorAnswer | None:
        """What is said to whoever comes now; None where there is room."""
        now = self._clock()
        if now < self._shut_until:
            self._unasked += 1
            return self._said
        try:
            self._state.runtime.searcher.require_room(self._count(now), self._unasked)
        except Overloaded as error:
            self._said, self._shut_until = answer_for(error), now + SHUT_SECONDS
            return self._said
        finally:
            self._unasked = 0
        return None

    def _learn(self, content: int, status: int | None) -> None:
        """Keeps what was answered; what was not, though it came in, no cache knows any more."""
        self._answered.pop(content, None)
        if status == HTTPStatus.OK:
            self._answered[content] = None
            if len(self._answered) > KNOWN_REQUESTS:
                del self._answered[next(iter(self._answered))]

    def _count(self, now: float) -> int:
        long_ago = now - MEMORY_SECONDS
        while self._inside and self._inside[oldest := next(iter(self._inside))] < long_ago:
            del self._inside[oldest]
        return len(self._inside)


def is_search(scope: Scope) -> bool:
    return scope["path"] == search.PATH and scope["method"] in search.METHODS
