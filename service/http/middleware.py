"""Middleware in plain ASGI: request id, API key, metrics, logs, and the response to any exception.

Access control: the scope of each path, the key of a request, its rate, and the audit log of changes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from random import getrandbits
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

import orjson
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from models.errors import CareError
from service.errors import Forbidden, NotFound, RateLimited, ShuttingDown, Unauthorized, UnknownHost, answer_for
from service.http.asgi import HEADERS, KEY, QUERIES, REQUEST_ID, SEARCH, TIMINGS, ClientLeft, closing_answer, send_bytes
from service.keys import ID, KeyRing, write_audit
from service.limits import ANYONE, Key, Rates
from service.limits import Scope as KeyScope
from service.metrics import ACCESS_LOGGER

if TYPE_CHECKING:
    from service.metrics import Metrics
    from service.traces import Traces

logger = logging.getLogger(__name__)
access_logger = logging.getLogger(ACCESS_LOGGER)

TRACE = "care.trace"
STATUS = "care.status"
SCOPE = "care.scope"  # of a request that takes more than the scope search
ACT = "care.act"
SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
CLIENT_CLOSED = 499  # as proxies log a client that closed the connection before its answer
UNMATCHED = "unmatched"
NO_METHOD = "-"
# A name that resolves to this machine may be an attacker's (DNS rebinding); an address cannot.
LOCAL_HOSTS = (rb"localhost", rb"[\d.]+", rb"\[[\da-f:.]+\]")
READS = ("GET", "HEAD")
# Globals: each is found in a third of the time of a member of an enum.
PUBLIC, SEARCHING, WRITING, ADMIN = None, KeyScope.SEARCH, KeyScope.WRITE, KeyScope.ADMIN
METRICS = "/metrics"
# The scope that a path takes: to read, and to do anything else. What begins with a path and a slash belongs to it.
# Nothing is answered at any other path, so a route that is missing here is closed.
PATHS: dict[str, tuple[KeyScope | None, KeyScope | None]] = {
    "/v1/search": (SEARCHING, SEARCHING),
    "/v1/embeddings": (SEARCHING, SEARCHING),
    "/v1/rerank": (SEARCHING, SEARCHING),
    "/v1/models": (SEARCHING, SEARCHING),
    "/v1/collection": (SEARCHING, SEARCHING),
    "/v1/documents": (SEARCHING, WRITING),
    "/admin": (ADMIN, ADMIN),
    METRICS: (ADMIN, ADMIN),
    "/livez": (PUBLIC, PUBLIC),
    "/readyz": (PUBLIC, PUBLIC),
    "/docs": (PUBLIC, PUBLIC),
    "/openapi.json": (PUBLIC, PUBLIC),
    "/static": (PUBLIC, PUBLIC),
    "/static-offline-docs": (PUBLIC, PUBLIC),
    "/": (PUBLIC, PUBLIC),
}
CLOSED = "this is closed, because there is no key; set CARE_ADMIN_TOKEN, or CARE_KEYS_FILE (care keys create)"
SEND_A_KEY = "send a key that is in force, as Authorization: Bearer … or api-key: …"
NOWHERE = "there is nothing at this path; /docs lists what there is"


def scope_of(method: str, path: str) -> KeyScope | None:
    """The scope that a request takes, PUBLIC if none; raises NotFound if nothing is at this path."""
    known = PATHS.get(path)
    if known is None:
        first, second, *_ = f"{path[1:]}/".split("/", 2)
        known = PATHS.get(f"/{first}/{second}") or (PATHS.get(f"/{first}") if first else None)
    if known is None:
        raise NotFound(NOWHERE)
    return known[method not in READS]


@dataclass(frozen=True, slots=True)
class Access:
    """Admits requests. Without a keys file, searches and metrics take no key.

    `admin_port` is the only port at which paths of scope admin are answered, None: any.
    """

    keys: KeyRing
    rates: Rates
    audit_log: Path | None = None
    admin_port: int | None = None

    def identify(self, request: Scope, headers: Mapping[bytes, bytes]) -> Key:
        """Finds the key of a request; raises Unauthorized, Forbidden, or NotFound for a path that is not served."""
        keys, scope = self.keys, scope_of(request["method"], request["path"])
        if scope is SEARCHING:
            if not keys.has_file:
                return ANYONE
        else:
            if scope is ADMIN and self.admin_port not in (None, (request.get("server") or (None, None))[1]):
                raise NotFound(NOWHERE)
            if scope is PUBLIC or (request["path"] == METRICS and not keys.has_file):
                return ANYONE
            request[SCOPE] = scope
        presented = headers.get(b"authorization", b"")
        is_bearer = presented[:7] == b"Bearer " or presented[:7].lower() == b"bearer "
        presented = presented[7:] if is_bearer else headers.get(b"api-key", b"")
        # Here and not in a method: a request meets this code cold, and a call costs it a microsecond.
        found = keys.found.get(presented[ID])
        if found is not None and compare_digest(presented, found[0]):
            key = found[1]
        elif presented and (known := keys.find(presented.strip())) is not None:
            key = known
        else:
            raise Forbidden(CLOSED) if keys.is_empty else Unauthorized(SEND_A_KEY)
        if scope not in key.scopes:
            request[KEY] = key  # for the logs
            raise Forbidden(f"this key lacks the scope {scope}; care keys create makes one that has it")
        return key

    def record(self, request: Scope, request_id: str, status: int) -> None:
        """Writes a change, an act of an administrator, or an attempt at one to the audit log; never a text."""
        if self.audit_log is None or SCOPE not in request:
            return
        if request["method"] in READS and status not in (401, 403):
            return
        key: Key = request.get(KEY, ANYONE)
        act = {"key": key.name, "act": f"{request['method']} {route_of(request)}", "status": status}
        details: dict[str, Any] = request.get(ACT, {})
        try:
            write_audit(self.audit_log, {**act, "request_id": request_id, **details})
        except OSError as error:
            logger.error("the audit log %s lacks the act of request %s: %s", self.audit_log, request_id, error)


def route_of(request: Scope) -> str:
    """The template of the route, or the part of the path that has a scope: the rest may be private."""
    if (route := request.get("route")) is not None:
        return str(route.path)
    return next((path for path in PATHS if path != "/" and request["path"].startswith(path)), "/")


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """The outermost layer that belongs to the service.

    `paths` are those of routes outside FastAPI, which names its own in the scope. `hosts` matches the Host headers
    that are served; None: any.
    """

    app: ASGIApp
    metrics: Metrics
    access: Access
    paths: Collection[str]
    hosts: re.Pattern[bytes] | None
    access_log: bool
    traces: Traces | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = perf_counter()
        self.metrics.request_began()
        headers = scope[HEADERS] = dict(scope["headers"])
        request_id = scope[REQUEST_ID] = _request_id(headers)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            # A request without a Host header passes: browsers always send one. One with two does not.
            if self.hosts is not None:
                host = headers.get(b"host", b"localhost")
                if len(headers) < len(scope["headers"]):
                    host = b" ".join(value for name, value in scope["headers"] if name == b"host") or host
                if not self.hosts.fullmatch(host):
                    raise UnknownHost("this host name is not served here; add it to CARE_ALLOWED_HOSTS if it should be")
            key = scope[KEY] = self.access.identify(scope, headers)
            if key.rate is not None:
                rates = self.access.rates
                wait = await rates.take(key.id, key.rate) if rates.are_shared else rates.take_here(key.id, key.rate)
                if wait:
                    raise RateLimited(f"this key may send {key.rate} requests; see Retry-After", wait)
            await self.app(scope, receive, send_with_id)
        except ClientLeft:
            pass
        except (Exception, asyncio.CancelledError) as error:
            if status:
                raise  # half an answer is sent: the server has to cut the connection
            if isinstance(error, asyncio.CancelledError):  # the server does it once CARE_SHUTDOWN_SECONDS are over
                error = ShuttingDown("the service shut down before this request was answered")
            answer = answer_for(error)
            if answer.status == 500:
                logger.exception("request %s failed", request_id)
            await send_bytes(send_with_id, answer.body(request_id), answer.status, answer.header_pairs())
        finally:
            seconds = perf_counter() - began
            self.metrics.request_ended()
            scope[STATUS] = status = status or scope.get(STATUS, CLIENT_CLOSED)
            route = self._route(scope)
            if self.traces is not None:
                search, timings = scope.get(SEARCH), scope.get(TIMINGS)
                caller, method = headers.get(b"traceparent"), scope["method"]
                scope[TRACE] = self.traces.add(
                    caller, method, route, request_id, status, began, seconds, search, timings
                )
            self._account(scope["method"], route, request_id, status, seconds, scope)
            if SCOPE in scope:
                self.access.record(scope, request_id, scope[STATUS])

    def answer_unparsed(self, error: CareError, scope: Scope | None) -> bytes:
        """Returns the whole answer to bytes that are not a request, or to a request that stays incomplete.

        `scope` belongs to an incomplete request: its route waits for the rest, and records the status when it ends.
        """
        answer = answer_for(error)
        if scope is not None:
            scope[STATUS] = answer.status
            return closing_answer(answer, scope.get(REQUEST_ID) or secrets.token_hex(8))
        request_id = secrets.token_hex(8)
        self._account(NO_METHOD, UNMATCHED, request_id, answer.status, None)
        return closing_answer(answer, request_id)

    def _account(
        self, method: str, route: str, request_id: str, status: int, seconds: float | None, scope: Scope | None = None
    ) -> None:
        self.metrics.request(route, status, seconds)
        if self.access_log:
            line = {
                "time": round(time(), 3),
                "request_id": request_id,
                "method": method,
                "route": route,
                "status": status,
                "milliseconds": round((seconds or 0.0) * 1000, 3),
            }
            known = scope or {}
            trace: bytes | None = known.get(TRACE)
            own = {"key": known.get(KEY, ANYONE).name, "queries": known.get(QUERIES), "trace_id": trace and trace.hex()}
            line |= {name: value for name, value in own.items() if value is not None}
            access_logger.info(orjson.dumps(line).decode())

    def _route(self, scope: Scope) -> str:
        """The template of the route: a path would be a label per document, and may hold private text."""
        if (route := scope.get("route")) is not None:
            return str(route.path)
        path: str = scope["path"]
        if path in self.paths:
            return path
        first = "/" + path[1:].partition("/")[0]
        return first if first in self.paths else UNMATCHED


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins call the service and read its answers; `*`: of any. Cookies have no part in it.

    It is outside everything else, so that errors have its headers too. A preflight takes no key.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["Authorization", "api-key", "Content-Type", "X-Request-Id"],
        expose_headers=["X-Request-Id", "Server-Timing", "Retry-After"],
    )


def host_pattern(names: Collection[str] | None) -> re.Pattern[bytes] | None:
    """Matches a Host header of these names, of localhost or of an IP address, with or without a port; None: any."""
    if names is None:
        return None
    known = b"|".join((*LOCAL_HOSTS, *(re.escape(name.encode()) for name in names)))
    return re.compile(rb"(?:%b)(?::\d*)?" % known, re.IGNORECASE)


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's id if it is short and plain, because it goes into headers and logs; else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and SANE_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{getrandbits(64):016x}"  # it is not a secret, and the system's random bytes take three times as long


@dataclass(frozen=True, slots=True)
class HotPath:
    """Sends searches past the framework's middleware, which takes longer than a search in the cache."""

    path: str
    methods: Collection[str]
    hot: ASGIApp
    rest: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_hot = scope["type"] == "http" and scope["path"] == self.path and scope["method"] in self.methods
        await (self.hot if is_hot else self.rest)(scope, receive, send)
