"""Generates search load over HTTP/1.1 from a process of its own; `measure(job)` starts it and reads its result.

Closed loop: every connection has one request under way and sends the next when its answer is complete. Open loop, if
the job has `per_second`: requests are due at even intervals; one that finds no free connection is counted and not sent.
Requests are written straight to the socket, because a client library would cost more than the server it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import count
from time import perf_counter
from typing import cast
from urllib.parse import quote

import httptools
import uvloop

from loadtest.harness import HOST, PATH, REPOSITORY, BenchError, port_of

# The service's default number of hits.
TOP_K = 10
STAGES = ("tokenize", "queue", "encode", "search", "rerank", "fetch", "total")
MAX_CONNECTIONS, MAX_OPEN_CONNECTIONS = 256, 512
MAX_SECONDS = 60.0
MAX_REQUESTS = 200_000
MAX_PER_SECOND = 20_000
# How long an answer may take after the last request was sent.
DRAIN_SECONDS = 10.0
START_SECONDS = 30.0
TICK_SECONDS = 0.001

TIMINGS, RESULTS = b'"timings_ms":', b'{"results":'


class Form(StrEnum):
    """The shape of a request: `POST /v1/search` for whole hits, or for ids and scores, or txtai's `GET /search`."""

    CARE = "care"
    IDS = "ids"
    TXTAI = "txtai"


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: address, queries, connections and seconds; an open loop if `per_second` is given.

    Query number n is `queries[n % len(queries)]`, from `first_number` on; if `numbered`, with n after it, so that none
    repeats. With `timings`, an answer of a closed loop without `timings_ms` is a failure. Requests carry the `key`.
    """

    url: str
    queries: Sequence[str]
    mode: str
    connections: int
    seconds: float
    first_number: int = 0
    max_requests: int = MAX_REQUESTS
    timings: bool = True
    numbered: bool = True
    form: Form = Form.CARE
    per_second: float | None = None
    key: str = ""

    def __post_init__(self) -> None:
        port_of(self.url)
        bounds: dict[str, float] = {"seconds": MAX_SECONDS, "max_requests": MAX_REQUESTS}
        if self.per_second is None:
            bounds["connections"] = MAX_CONNECTIONS
        else:
            bounds |= {"connections": MAX_OPEN_CONNECTIONS, "per_second": MAX_PER_SECOND}
        for name, most in bounds.items():
            if not 0 < getattr(self, name) <= most:
                raise BenchError(f"{name} must be above 0 and at most {most}, not {getattr(self, name)}")
        if not self.queries:
            raise BenchError("there is no query to send; give a file that has some")


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of a job; times in milliseconds, from writing a request to the last byte of its answer.

    `latency_ms`, `body_bytes` and the lists of `timings_ms` have one entry per good answer, in one order. The fields
    from `refused_ms` on are those of an open loop: answers of 429 and how many of them lack Retry-After, requests that
    found every connection busy, and how much later than due each request was written. `processor_seconds` is the
    server's, if the caller adds it.
    """

    sent: int
    elapsed_seconds: float
    latency_ms: list[float]
    body_bytes: list[int]
    timings_ms: dict[str, list[float]]
    failures: dict[str, int]
    refused_ms: list[float] = field(default_factory=list)
    without_retry_after: int = 0
    unsent: int = 0
    late_ms: list[float] = field(default_factory=list)
    processor_seconds: float = 0.0

    @property
    def requests_per_second(self) -> float:
        return len(self.latency_ms) / self.elapsed_seconds


def measure(job: Job) -> Measurement:
    """Runs the job in a process of its own, so that the caller's memory does not slow the generator down."""
    limit_seconds = START_SECONDS + job.seconds + DRAIN_SECONDS
    command = [sys.executable, "-m", "loadtest.harness.generator"]
    given = json.dumps(asdict(job))
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, cwd=REPOSITORY, timeout=limit_seconds
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"the client did not end within {limit_seconds:.0f} s; is the machine overloaded?") from None
    if done.returncode != 0:
        raise BenchError((done.stderr.strip() or "the client ended without a message").splitlines()[-1])
    return Measurement(**json.loads(done.stdout))


def drive(job: Job) -> Measurement:
    """Runs the job in this process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Load(job).run())


def write_requests(job: Job) -> Iterator[bytes]:
    """Yields the requests as they go over the wire, without end; as much as possible is written beforehand."""
    if job.form == Form.TXTAI:
        beginnings = [f"GET /search?limit={TOP_K}&query={quote(query, safe='')}".encode() for query in job.queries]
        rest, suffix = f" HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode(), b"%%20%d"
    else:
        beginnings = [b'{"query":' + json.dumps(query, ensure_ascii=False).encode()[:-1] for query in job.queries]
        rest = b'","mode":' + json.dumps(job.mode).encode() + (b',"fields":[]}' if job.form == Form.IDS else b"}")
        suffix = b" %d"
    key = f"Authorization: Bearer {job.key}\r\n" if job.key else ""
    head = f"POST {PATH} HTTP/1.1\r\nHost: {HOST}\r\n{key}Content-Type: application/json\r\nContent-Length: ".encode()
    for number in count(job.first_number):
        request = beginnings[number % len(beginnings)] + (suffix % number if job.numbered else b"") + rest
        yield request if job.form == Form.TXTAI else b"%b%d\r\n\r\n%b" % (head, len(request), request)


class _Load:
    """Drives the connections of one job and collects their answers."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = write_requests(job)
        # The connection that has been idle longest comes first, so that the server closes none of them.
        self._free: deque[_Connection] = deque()
        self._idle = asyncio.Event()
        self._deadline = 0.0
        self._last_answer: float | None = None
        self._answers: list[tuple[float, int, bytes]] = []
        self._refused: list[float] = []
        self._late: list[float] = []
        self._sent = self._unsent = self._without_retry_after = 0
        self.busy = 0
        self.failures: Counter[str] = Counter()

    async def run(self) -> Measurement:
        loop, job = asyncio.get_running_loop(), self._job
        port = port_of(job.url)
        try:
            made = [await loop.create_connection(lambda: _Connection(self), HOST, port) for _ in range(job.connections)]
        except OSError as error:
            raise BenchError(f"{job.url} is not reachable ({error}); start the service first") from error
        connections = [connection for _, connection in made]
        began = perf_counter()
        if job.per_second is None:
            self._deadline = began + job.seconds
            for connection in connections:
                self._send_next(connection)
            await self._wait_idle(job.seconds + DRAIN_SECONDS)
            seconds = (self._last_answer or perf_counter()) - began
        else:
            self._free.extend(connections)
            await self._send_at_rate(began, job.per_second)
            seconds = perf_counter() - began
            await self._wait_idle(DRAIN_SECONDS)
        for connection in connections:
            connection.end("no answer")
        return self._result(seconds)

    def _send_next(self, connection: _Connection) -> None:
        if self._sent < self._job.max_requests and perf_counter() < self._deadline:
            self._sent += 1
            connection.send(next(self._requests))

    async def _send_at_rate(self, began: float, per_second: float) -> None:
        whole = int(per_second * self._job.seconds)
        number = 0
        while number < whole:
            now = perf_counter()
            due = min(whole, int((now - began) * per_second) + 1)
            for one in range(number, due):
                if not self._free:
                    self._unsent += due - one
                    break
                self._late.append((now - began - one / per_second) * 1000)
                self._sent += 1
                self._free.popleft().send(next(self._requests))
            number = due
            await asyncio.sleep(TICK_SECONDS)

    async def _wait_idle(self, seconds: float) -> None:
        if self.busy:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    def answered(self, connection: _Connection, sent_at: float, status: int, body: bytes) -> None:
        """Records one complete answer. It is parsed after the load, when nothing is measured."""
        now, is_open = perf_counter(), self._job.per_second is not None
        if is_open and status == 429:
            self._refused.append((now - sent_at) * 1000)
            self._without_retry_after += not connection.has_retry_after
        elif status != 200:
            self.failures[f"status {status}"] += 1
        elif is_open and not body.startswith(RESULTS):
            self.failures["no results"] += 1
        else:
            self._last_answer = now
            at = -1 if is_open or not self._job.timings else body.rfind(TIMINGS)
            self._answers.append((now - sent_at, len(body), body[at + len(TIMINGS) : -1] if at >= 0 else b""))
        if is_open:
            self._free.append(connection)
        else:
            self._send_next(connection)
        self.check_idle()

    def ended(self, connection: _Connection) -> None:
        """Drops a connection that broke."""
        if connection in self._free:
            self._free.remove(connection)
        self.check_idle()

    def check_idle(self) -> None:
        if not self.busy:
            self._idle.set()

    def _result(self, seconds: float) -> Measurement:
        latencies: list[float] = []
        sizes: list[int] = []
        timed = self._job.timings and self._job.per_second is None
        by_stage: dict[str, list[float]] = {stage: [] for stage in STAGES} if timed else {}
        for latency, size, raw in self._answers:
            if timed:
                try:
                    timings = json.loads(raw)
                    values = [float(timings[stage]) for stage in STAGES]
                except (ValueError, TypeError, KeyError):
                    self.failures["no timings_ms"] += 1
                    continue
                for stage, value in zip(STAGES, values, strict=True):
                    by_stage[stage].append(value)
            latencies.append(latency * 1000)
            sizes.append(size)
        return Measurement(
            self._sent, seconds, latencies, sizes, by_stage, dict(self.failures),
            self._refused, self._without_retry_after, self._unsent, self._late,
        )  # fmt: skip


class _Connection(asyncio.Protocol):
    """One connection with at most one request under way; one that breaks is not opened again."""

    _transport: asyncio.Transport

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self._body = b""
        self._sent_at = 0.0
        self._busy = self._complete = self._ended = self.has_retry_after = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has all methods of asyncio's, but is not a subclass of it.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        self._body = b""
        self._busy, self._complete, self.has_retry_after = True, False, False
        self._load.busy += 1
        self._sent_at = perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.end("bad answer", always=True)
            return
        if self._complete:
            self._busy = False
            self._load.busy -= 1
            self._load.answered(self, self._sent_at, self._parser.get_status_code(), self._body)

    def on_message_begin(self) -> None:
        if self._complete or not self._busy:
            raise ValueError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.has_retry_after |= name.lower() == b"retry-after" and value.isdigit()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._complete = True

    def connection_lost(self, error: Exception | None) -> None:
        self.end("connection lost")

    def end(self, failure: str, *, always: bool = False) -> None:
        """Ends the connection on the first call; counts the failure if a request is under way, or `always`."""
        if self._ended:
            return
        self._ended = True
        if self._busy or always:
            self._load.failures[failure] += 1
        self._load.busy -= self._busy
        self._busy = False
        self._load.ended(self)
        self._transport.abort()


def main() -> int:
    """Reads a job as JSON from standard input, writes its measurement as JSON to standard output."""
    # Nothing here makes cycles, and a collection would be counted as the server's latency.
    gc.disable()
    try:
        measured = drive(Job(**json.load(sys.stdin)))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    json.dump(asdict(measured), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
