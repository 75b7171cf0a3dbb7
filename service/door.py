"""The door of the hot path: searches come in, or are refused on the spot, before there is a task, a body or a token.

Refusing must not take the time of answering. So those who came in and were not answered yet are counted here: many may
come in one turn of the event loop, long before the first of them reaches the engine's queue.
"""

from __future__ import annotations

from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from service.api import search
from service.errors import Overloaded
from service.middleware import RequestFrame

COUNTED = "care.counted"
# A body of a thousand bytes or more may hold many queries, which wait in a lane of their own.
BULK_DIGITS = 4


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

    def refuse(self, scope: Scope, close: bool) -> bytes | None:
        """The whole answer to a search that is not let in; None to everything that is. `close`: the connection ends."""
        if not is_search(scope) or _may_be_bulk(scope):
            return None
        try:
            self._state.runtime.searcher.require_room(self._inside)
        except Overloaded as error:
            return self._app.refuse(scope, error, close=close)
        scope[COUNTED] = True
        self._inside += 1
        return None


def is_search(scope: Scope) -> bool:
    return scope["path"] == search.PATH and scope["method"] in search.METHODS


def _may_be_bulk(scope: Scope) -> bool:
    return any(name == b"content-length" and len(value) >= BULK_DIGITS for name, value in scope["headers"])
