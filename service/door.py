"""The door of the hot path: searches come in, or are refused on the spot, as bytes: no parser, task or token is spent.

Refusing must not take the time of answering. So those who came in and were not answered yet are counted here: many may
come in one turn of the event loop, long before the first of them reaches the engine's queue.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from service.api import search
from service.errors import Overloaded
from service.middleware import RequestFrame

COUNTED = "care.counted"
# The head of a search whose end is known. Of more than 999 bytes, which may hold many queries in a lane of their own,
# of chunks, or of a client that waits to be told to go on, it takes a parser to know more.
LINES = rb"(?:(?!Content-Length|Transfer-Encoding|Expect|Upgrade)[\w-]+:[^\r\n]*\r\n)*"
HEAD = re.compile(
    rb"(POST|GET) %b(?:\?[^ \r\n]*)? HTTP/1\.1\r\n%b(?:Content-Length: *(\d{1,3})\r\n%b)?\r\n"
    % (search.PATH.encode(), LINES, LINES),
    re.IGNORECASE,
)
OWN_ID = re.compile(rb"\r\nX-Request-Id: *([^\r\n]*)", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nConnection:[^\r\n]*close", re.IGNORECASE)


class Refused(NamedTuple):
    """The whole answer to a request of so many bytes; `close`: its connection ends with it."""

    answer: bytes
    size: int
    close: bool


class Door:
    """An ASGI application around the search route."""

    def __init__(self, app: RequestFrame, state: State) -> None:
        """`state` is the application's, where its runtime will be found."""
        self._app = app
        self._state = state
        self._inside = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._inside -= COUNTED in scope

    def refuse(self, data: bytes) -> Refused | None:
        """What becomes of a search that is not let in; `data` begins with a request. None: let it be parsed."""
        head = HEAD.match(data)
        if head is None:
            return None
        try:
            self._state.runtime.searcher.require_room(self._inside)
        except Overloaded as error:
            method, length = head.groups()
            own_id, close = OWN_ID.search(data, 0, head.end()), CLOSE.search(data, 0, head.end()) is not None
            answer = self._app.refuse(error, method.decode(), search.PATH, own_id and own_id[1], close=close)
            return Refused(answer, head.end() + int(length or 0), close)
        return None

    def count(self, scope: Scope) -> None:
        """Counts a search that comes in, until it is answered."""
        if is_search(scope):
            scope[COUNTED] = True
            self._inside += 1


def is_search(scope: Scope) -> bool:
    return scope["path"] == search.PATH and scope["method"] in search.METHODS
