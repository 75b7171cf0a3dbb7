"""What the door makes of the first bytes of a request while there is no room."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.door import KNOWN_REQUESTS, MEMORY_SECONDS, SHORT_BYTES, SHUT_SECONDS, Door
from service.errors import Overloaded
from service.metrics import Metrics
from service.middleware import RequestFrame
from tests.unit.service.support import Clock

BODY = b'{"query": "q"}'
PLAIN = b"POST /v1/search HTTP/1.1\r\nHost: care\r\nContent-Length: 14\r\nAccept: */*\r\n\r\n"
BY_URL = b"GET /v1/search?q=a%20b HTTP/1.1\r\nHost: care\r\n\r\n"
EMPTY = b"POST /v1/search HTTP/1.1\r\nhost: care\r\ncontent-length:0\r\nConnection: keep-alive\r\n\r\n"

pytestmark = pytest.mark.anyio


def large(body: bytes) -> bytes:
    """A request whose body is too large to be refused unseen."""
    filled = body % (b"q" * SHORT_BYTES)
    return PLAIN.replace(b": 14", b": %d" % len(filled)) + filled


async def no_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers nothing."""


class Answering:
    """Answers with a status."""

    def __init__(self) -> None:
        self.status = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": []})


async def nowhere(message: Message) -> None:
    """Takes what is sent."""


class House:
    """A searcher with so many places, perhaps with a cache; says how many it was told are inside."""

    def __init__(self, places: int, *, remembers: bool = False) -> None:
        self.places = places
        self.remembers = remembers
        self.told: list[int] = []
        self.unasked: list[int] = []

    def require_room(self, inside: int, unasked: int) -> None:
        self.told.append(inside)
        self.unasked.append(unasked)
        if inside >= self.places:
            raise Overloaded("no room", 2.5)


def door_of(house: House, clock: Callable[[], float] = time.monotonic, app: ASGIApp = no_app) -> Door:
    frame = RequestFrame(app, Metrics(), ["/v1/search"], access_log=False)
    return Door(frame, State({"runtime": SimpleNamespace(searcher=house)}), clock)


def scope_of(path: str) -> Scope:
    return {"type": "http", "method": "POST", "path": path, "headers": []}


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (PLAIN + BODY, len(PLAIN) + 14),
        (PLAIN, len(PLAIN) + 14),  # its body is still to come
        (PLAIN + BODY + b"GET / HTTP/1.1\r\n", len(PLAIN) + 14),  # and the next request is here already
        (large(b'{"query": "%b"}') + BODY, len(large(b'{"query": "%b"}'))),
        (large(b'{"query": "\\"query\\": [%b"}'), len(large(b'{"query": "\\"query\\": [%b"}'))),
        (BY_URL, len(BY_URL)),
        (EMPTY, len(EMPTY)),
    ],
)
def test_a_plain_search_is_refused_whole(data: bytes, size: int) -> None:
    refused = door_of(House(0)).refuse(data)
    assert refused is not None
    assert (refused.size, refused.close) == (size, False)
    head, _, body = refused.answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 429 Too Many Requests"
    assert b"retry-after: 3" in lines
    assert b"content-length: %d" % len(body) in lines
    error = json.loads(body)["error"]
    assert (error["code"], error["message"]) == ("overloaded", "no room")
    assert b"x-request-id: " + error["request_id"].encode() in lines


@pytest.mark.parametrize(
    "data",
    [
        PLAIN.replace(b"/v1/search", b"/v1/searches"),
        PLAIN.replace(b"POST", b"DELETE"),
        PLAIN.replace(b"1.1", b"1.0"),
        PLAIN.replace(b": 14", b": 1000"),  # may hold many queries
        large(b'{"bulk" : true, "query": "%b"}'),
        large(b'{"top_k": 3, "query": ["%b", "b"]}'),
        large(b'{"query": "%b"}').replace(b": 1", b": 100001"),
        PLAIN.replace(b": 14", b": 14\r\nContent-Length: 15"),
        PLAIN.replace(b"Content-Length: 14", b"Transfer-Encoding: chunked"),
        PLAIN.replace(b"Accept: */*", b"Expect: 100-continue"),
        PLAIN.replace(b"Accept: */*", b"Upgrade: h2c"),
        PLAIN.replace(b"Accept: */*", b"Accept: */*\r\n folded"),
        PLAIN[:-2],  # not all of the head is here
        b"",
    ],
)
def test_what_takes_a_parser_to_understand_is_let_through(data: bytes) -> None:
    house = House(0)
    assert door_of(house).refuse(data) is None
    assert house.told == []


def test_a_client_hears_its_own_id_where_it_is_plain_and_may_have_its_connection_closed() -> None:
    door = door_of(House(0))
    own = door.refuse(PLAIN.replace(b"Accept: */*", b"x-request-id: abc-1\r\nConnection: close"))
    assert own is not None
    assert own.close
    assert b"\r\nconnection: close\r\n" in own.answer
    assert json.loads(own.answer.partition(b"\r\n\r\n")[2])["error"]["request_id"] == "abc-1"
    odd = door.refuse(PLAIN.replace(b"Accept: */*", b'X-Request-Id: a"b'))
    assert odd is not None
    assert b'a"b' not in odd.answer


async def test_a_search_is_inside_from_its_head_to_its_answer() -> None:
    house, clock = House(2), Clock()
    door = door_of(house, clock)
    scopes = [scope_of(path) for path in ("/v1/search", "/livez", "/v1/search")]
    for scope in scopes:
        assert door.refuse(PLAIN) is None
        door.enter(scope)
    assert house.told == [0, 1, 1]
    assert door.refuse(PLAIN) is not None
    await door(scopes[0], None, None)  # type: ignore[arg-type]
    clock.now += SHUT_SECONDS
    assert door.refuse(PLAIN) is None
    assert house.told[3:] == [2, 1]


async def test_whoever_waits_for_something_else_than_the_engine_keeps_nobody_out() -> None:
    house, clock = House(2), Clock()
    door = door_of(house, clock)
    slow = [scope_of("/v1/search") for _ in range(2)]
    for scope in slow:
        door.enter(scope)
        clock.now += MEMORY_SECONDS / 2
    assert door.refuse(PLAIN) is not None
    clock.now += MEMORY_SECONDS / 4
    assert door.refuse(PLAIN) is None
    for scope in slow:
        await door(scope, None, None)  # type: ignore[arg-type]
    assert door.refuse(PLAIN) is None
    assert house.told == [2, 1, 0]


def test_after_a_refusal_the_door_stays_shut_for_a_moment_and_counts_who_comes() -> None:
    house, clock = House(0), Clock()
    door = door_of(house, clock)
    answers = [door.refuse(PLAIN) for _ in range(3)]
    assert len({refused.answer for refused in answers if refused}) == 3  # each with an id of its own
    house.places = 1
    assert door.refuse(PLAIN) is not None
    clock.now += SHUT_SECONDS
    assert door.refuse(PLAIN) is None
    assert door.refuse(PLAIN) is None
    assert house.unasked == [0, 3, 0]


async def ask(door: Door, data: bytes) -> bool:
    """Whether a request comes in; it is then answered."""
    if door.refuse(data) is not None:
        return False
    scope = scope_of("/v1/search")
    door.enter(scope)
    await door(scope, None, nowhere)  # type: ignore[arg-type]
    return True


async def test_what_was_answered_comes_in_whatever_the_load_where_answers_are_cached() -> None:
    house = House(1, remembers=True)
    door = door_of(house, app=Answering())
    assert await ask(door, PLAIN + BODY)
    assert await ask(door, BY_URL)
    house.places = 0
    assert await ask(door, PLAIN + BODY)
    assert await ask(door, BY_URL)
    assert await ask(door, PLAIN.replace(b"*/*", b"text/html") + BODY)  # headers do not change what is asked
    assert not await ask(door, PLAIN + BODY.replace(b"q", b"r"))
    assert not await ask(door, BY_URL.replace(b"a%20b", b"b"))
    assert not await ask(door, PLAIN)  # what it asks is still to come


async def test_without_a_cache_nobody_is_known() -> None:
    house = House(1)
    door = door_of(house, app=Answering())
    assert await ask(door, PLAIN + BODY)
    house.places = 0
    assert not await ask(door, PLAIN + BODY)


async def test_whoever_came_in_and_was_not_answered_is_known_no_more() -> None:
    house, app = House(1, remembers=True), Answering()
    door = door_of(house, app=app)
    assert await ask(door, PLAIN + BODY)
    house.places, app.status = 0, 429
    assert await ask(door, PLAIN + BODY)
    assert not await ask(door, PLAIN + BODY)


async def test_the_latest_answers_are_known() -> None:
    house = House(1, remembers=True)
    door = door_of(house, app=Answering())
    for number in range(KNOWN_REQUESTS + 1):
        assert await ask(door, BY_URL.replace(b"a%20b", b"%d" % number))
    house.places = 0
    assert not await ask(door, BY_URL.replace(b"a%20b", b"0"))
    assert await ask(door, BY_URL.replace(b"a%20b", b"1"))
