"""Sends traces of requests to an OpenTelemetry collector by OTLP over HTTP; loaded only if one is configured.

A request leaves one tuple behind. A thread makes spans of it: one of the request and, after a search, one of each
stage, laid end to end because a request knows how long its stages took and not when. OpenTelemetry's SDK would open and
close six live spans on the search path. Even the protocol's messages take 61 µs a request if each is built, so what
requests have in common is serialised once, with ids and times behind it: in protobuf, joined bytes are one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from operator import attrgetter
from random import getrandbits, random
from secrets import token_hex
from struct import Struct
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING

import httpx
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from models.package import care_version
from service.metrics import STAGES

if TYPE_CHECKING:
    from service.metrics import Metrics, Timings
    from service.search.request import SearchRequest
    from service.settings import Settings

logger = logging.getLogger(__name__)

PATH = "/v1/traces"
NAME = "care-search"
# W3C Trace Context: version, trace, span that called, flags; later versions may add more.
TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
SAMPLED = 1
SEND_SECONDS = 1.0  # between batches
TIMEOUT_SECONDS = 5.0
MOST_WAITING = 4096  # requests that are not sent yet; older ones are dropped
MOST_AT_ONCE = 2048
NO_PARENT = LATER = b""
REFUSED = 422

Facts = dict[str, str | int]
"""Attributes of a span."""
Traced = tuple[bytes, bytes, float, float, str, str, int, str, int, int, str, tuple[float, ...]]
"""A request that has ended: trace, parent, begin, seconds, method, route, status, id, top_k, queries, texts, stages.

A plain tuple of plain values, which the garbage collector leaves alone: thousands wait at a time. It holds few new
objects, because those are in memory that no cache of the processor has.
"""


class Traces:
    """Collects traces of this process. If the collector is down or slow, spans are dropped and counted."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._share = settings.traces_share
        self._queries = settings.traces_queries
        self._logs_ids = settings.access_log
        self._source = settings.collection.resolve().name
        self._metrics = metrics
        self._waiting: deque[Traced] = deque()
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS)
        self._url = (settings.traces_url or "").rstrip("/") + PATH
        version = care_version()
        service: Facts = {"service.name": NAME, "service.version": version, "service.instance.id": token_hex(8)}
        resource = Resource(attributes=list(_attributes(service)))
        self._resource = ResourceSpans(resource=resource).SerializeToString()
        self._scope = ScopeSpans(scope=InstrumentationScope(name=NAME, version=version)).SerializeToString()
        self._is_away = False
        self._epoch_ns = 0  # of perf_counter, since 1970

    def add(
        self,
        caller: bytes | None,
        method: str,
        route: str,
        request_id: str,
        status: int,
        began: float,
        seconds: float,
        search: SearchRequest | None,
        timings: Timings | None,
    ) -> bytes | None:
        """Queues a request that began at this time of `perf_counter` and has ended.

        Returns its trace for the access log; None if it is not traced, empty if the sender makes one. `caller` is its
        `traceparent`, which decides; of the requests without one a share is traced.
        """
        if caller is not None and (given := TRACEPARENT.fullmatch(caller)):
            if not int(given[3], 16) & SAMPLED:
                return None
            trace_id, parent = bytes.fromhex(given[1].decode()), bytes.fromhex(given[2].decode())
        elif self._share < 1 and random() >= self._share:
            return None
        else:
            trace_id, parent = _new_trace_id() if self._logs_ids else LATER, NO_PARENT
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._metrics.traces("dropped", 1)
        # What was refused retrieved nothing, and its numbers may be larger than the protocol's.
        top_k = count = 0
        if search is not None and status != REFUSED:
            top_k, count = search.top_k, 1 if isinstance(search.query, str) else len(search.query)
        texts = "\n".join(search.queries) if self._queries and search is not None else ""
        # A result that is not in the cache is fetched; without one there is no stage to show.
        stages = _seconds(timings) if timings is not None and timings.fetch else ()
        self._waiting.append(
            (trace_id, parent, began, seconds, method, route, status, request_id, top_k, count, texts, stages)
        )
        return trace_id

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Sends in the background while the block runs, and what is left at its end."""

        over = asyncio.Event()

        async def send() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), SEND_SECONDS)
                await send_now()

        async def send_now() -> None:
            try:
                await asyncio.to_thread(self._send)
            except Exception:  # costs one batch, not all later traces
                logger.exception("a batch of traces is lost")

        task = asyncio.create_task(send())
        try:
            yield
        finally:
            over.set()
            await task
            await send_now()  # what came while the task sent
            self._client.close()

    def _send(self) -> None:
        """Sends what waits now, in batches; drops a batch that the collector does not take.

        What comes meanwhile waits for the next time: sending it at once took a post for every two or three requests.
        """
        left, self._epoch_ns = len(self._waiting), time_ns() - perf_counter_ns()
        while left > 0:
            batch = [self._waiting.popleft() for _ in range(min(MOST_AT_ONCE, left))]
            left -= len(batch)
            scoped = self._scope + b"".join(map(self._spans, batch))
            message = _field(RESOURCE_SPANS, self._resource + _field(SCOPE_SPANS, scoped))
            headers = {"content-type": "application/x-protobuf"}
            try:
                self._client.post(self._url, content=message, headers=headers).raise_for_status()
            except httpx.HTTPError as error:
                self._metrics.traces("dropped", len(batch))
                if not self._is_away:  # once, not at every batch
                    reason = type(error).__name__
                    if isinstance(error, httpx.HTTPStatusError):
                        reason = f"status {error.response.status_code}"
                    # Neither the URL nor the error's own text, which repeats it: it may hold a password.
                    host = httpx.URL(self._url).netloc.decode()
                    logger.warning("traces are dropped: the collector at %s fails (%s)", host, reason)
                self._is_away = True
                return
            self._is_away = False
            self._metrics.traces("sent", len(batch))

    def _spans(self, traced: Traced) -> bytes:
        """Returns the span of a request and those of its stages, as they stand in a ScopeSpans message."""
        trace_id, parent, began, seconds, method, route, status, request_id, top_k, count, texts, stages = traced
        began_ns = self._epoch_ns + int(began * 1e9)
        ended_ns = began_ns + int(seconds * 1e9)
        trace_id = trace_id or _new_trace_id()
        # A trace that begins here has a random id, half of which will do for its first span.
        own = _new_span_id() if parent else trace_id[8:]
        rest = OWN.pack(TRACE_ID, trace_id, SPAN_ID, own, BEGIN, began_ns, END, ended_ns)
        if parent:
            rest += PARENT + parent
        if texts:
            rest += _attribute("gen_ai.retrieval.query.text", texts)
        spans = _opening(self._source, method, route, status, top_k, count, len(request_id), len(rest))
        spans += request_id.encode() + rest
        if not stages:
            return spans
        at_ns = max(began_ns, ended_ns - int(stages[-1] * 1e9))
        for known, took in zip(STAGE_FACTS, stages, strict=False):  # the last of them is the total
            if not took:  # few are reranked, a lexical search encodes nothing
                continue
            end_ns = at_ns + int(took * 1e9)
            times = OWN.pack(TRACE_ID, trace_id, SPAN_ID, _new_span_id(), BEGIN, at_ns, END, end_ns)
            spans += _field(SPANS, known + PARENT + own + times)
            at_ns = end_ns
        return spans


# Identity and time of a span as they are on the wire: a tag and, where the length is not the type's, the length.
OWN = Struct("<2s16s2s8scQcQ")
TRACE_ID, SPAN_ID, PARENT, BEGIN, END = b"\x0a\x10", b"\x12\x08", b"\x22\x08", b"\x39", b"\x41"
RESOURCE_SPANS, SCOPE_SPANS, SPANS, ATTRIBUTES = b"\x0a", b"\x12", b"\x12", b"\x4a"
KEY, VALUE, TEXT = b"\x0a", b"\x12", b"\x0a"
STAGE_FACTS = [Span(name=stage, kind=Span.SPAN_KIND_INTERNAL).SerializeToString() for stage in STAGES[:-1]]
_seconds = attrgetter(*STAGES)


def _new_trace_id() -> bytes:
    return getrandbits(128).to_bytes(16)


def _new_span_id() -> bytes:
    return (getrandbits(64) or 1).to_bytes(8)


def _field(tag: bytes, content: bytes) -> bytes:
    """Returns a field of a message: tag, length as a varint, content."""
    rest = len(content)
    if rest < 128:
        return b"%b%c%b" % (tag, rest, content)
    length = b""
    while rest > 127:
        length += b"%c" % (rest & 127 | 128)
        rest >>= 7
    return b"%b%b%c%b" % (tag, length, rest, content)


@lru_cache(1024)
def _opening(
    source: str, method: str, route: str, status: int, top_k: int, count: int, id_length: int, rest_length: int
) -> bytes:
    """Serialises the part of a span that many requests share; its id and the rest, of these lengths, must follow."""
    known = _request_facts(source, method, route, status, top_k, count) + _attribute("care.request_id", "-" * id_length)
    return _field(SPANS, known + bytes(rest_length))[: -id_length - rest_length]


@lru_cache(1024)
def _request_facts(source: str, method: str, route: str, status: int, top_k: int, count: int) -> bytes:
    facts: Facts = {"http.request.method": method, "http.route": route, "http.response.status_code": status}
    if count:
        facts |= {"gen_ai.operation.name": "retrieval", "gen_ai.data_source.id": source}
        facts |= {"gen_ai.retrieval.top_k": top_k, "care.queries": count}
    failed = Status(code=Status.STATUS_CODE_ERROR if status >= 500 else Status.STATUS_CODE_UNSET)
    attributes = list(_attributes(facts))
    span = Span(name=f"{method} {route}", kind=Span.SPAN_KIND_SERVER, attributes=attributes, status=failed)
    serialised: bytes = span.SerializeToString()
    return serialised


def _attribute(name: str, text: str) -> bytes:
    value = _field(VALUE, _field(TEXT, text.encode()))
    return _field(ATTRIBUTES, _field(KEY, name.encode()) + value)


def _attributes(facts: Facts) -> Iterator[KeyValue]:
    for name, value in facts.items():
        known = AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value)
        yield KeyValue(key=name, value=known)
