"""A lean load generator for search requests, in a process of its own: `measure(job)` starts it and reads its result.

Closed loop: every connection has exactly one request under way and sends the next when its answer is complete. HTTP/1.1
with keep-alive, written straight to the socket, because a client library would cost more than the server that it
measures. Bounded in connections, time and count, and it talks to 127.0.0.1 only. Knows the shape of a search request,
ours and txtai's, and of `timings_ms`; knows nothing of rankings, of rounds or of what its figures are compared with.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, cast
from urllib.parse import quote

import uvloop

from loadtest.harness.errors import BenchError
from loadtest.harness.http1 import HOST, Answer, BadAnswer, ResponseReader, port_of

PATH = "/v1/search"
# What a search gives unless it is asked for another number.
TOP_K = 10
STAGES = ("tokenize", "queue", "encode", "search", "fetch", "total")
MAX_CONNECTIONS = 256
MAX_SECONDS = 60.0
MAX_REQUESTS = 200_000
# How long an answer may still take after the last request was sent; what comes later did not come.
DRAIN_SECONDS = 10.0
START_SECONDS = 30.0

REPOSITORY = Path(__file__).parents[2]
TIMINGS = b'"timings_ms":'


class Form(StrEnum):
    """How a query is asked: `POST /v1/search` with JSON, for whole hits or for their ids and scores alone, or
    `GET /search?query=` as txtai's API wants it."""

    CARE = "care"
    IDS = "ids"
    TXTAI = "txtai"


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement: who is asked, what, by how many connections and for how long.

    Query number n is `queries[n % len(queries)]`, from `first_number` on; if `numbered`, with n after it, so that none
    repeats. `timings` says that an answer without `timings_ms` is a failure.
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

    def __post_init__(self) -> None:
        port_of(self.url)
        bounds = {"connections": MAX_CONNECTIONS, "seconds": MAX_SECONDS, "max_requests": MAX_REQUESTS}
        for name, most in bounds.items():
            if not 0 < getattr(self, name) <= most:
                raise BenchError(f"{name} must be above 0 and at most {most}, not {getattr(self, name)}")
        if not self.queries:
            raise BenchError("there is no query to send; give a file that has some")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one job saw. The lists have one entry per good answer, in one order; `timings_ms` is empty if not asked."""

    sent: int
    elapsed_seconds: float
    latency_ms: list[float]
    body_bytes: list[int]
    timings_ms: dict[str, list[float]]
    failures: dict[str, int]

    @property
    def requests_per_second(self) -> float:
        return len(self.latency_ms) / self.elapsed_seconds


def measure(job: Job) -> Measurement:
    """Runs the job in a process of its own, so that neither the caller nor its memory slows the client down."""
    return Measurement(**run_apart("loadtest.harness.client", asdict(job), job.seconds))


def run_apart(module: str, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What `python -m module` writes as JSON after reading the job as JSON; it works for so many seconds."""
    limit_seconds = START_SECONDS + seconds + DRAIN_SECONDS
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, cwd=REPOSITORY, timeout=limit_seconds
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"the client did not end within {limit_seconds:.0f} s; is the machine overloaded?") from None
    if done.returncode != 0:
        raise BenchError((done.stderr.strip() or "the client ended without a word").splitlines()[-1])
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def drive(job: Job) -> Measurement:
    """Runs the job in this process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Run(job).run())


def write_requests(job: Job) -> Iterator[bytes]:
    """The requests as they go over the wire, without end; all that can be written beforehand is."""
    return _get_requests(job) if job.form == Form.TXTAI else _post_requests(job)


def _post_requests(job: Job) -> Iterator[bytes]:
    head = f"POST {PATH} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: ".encode()
    beginnings = [b'{"query":' + json.dumps(query, ensure_ascii=False).encode()[:-1] for query in job.queries]
    rest = b'","mode":' + json.dumps(job.mode).encode() + (b',"fields":[]}' if job.form == Form.IDS else b"}")
    for number in count(job.first_number):
        suffix = b" %d" % number if job.numbered else b""
        body = beginnings[number % len(beginnings)] + suffix + rest
        yield b"%b%d\r\n\r\n%b" % (head, len(body), body)


def _get_requests(job: Job) -> Iterator[bytes]:
    beginnings = [f"GET /search?limit={TOP_K}&query={quote(query, safe='')}".encode() for query in job.queries]
    rest = f" HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
    for number in count(job.first_number):
        suffix = b"%%20%d" % number if job.numbered else b""
        yield beginnings[number % len(beginnings)] + suffix + rest


class _Run:
    """The state that the connections of one job share."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = write_requests(job)
        self._answers: list[tuple[float, int, bytes]] = []
        self._last_answer: float | None = None
        self._deadline = 0.0
        self.sent = 0
        self.failures: Counter[str] = Counter()

    async def run(self) -> Measurement:
        loop = asyncio.get_running_loop()
        port = port_of(self._job.url)
        try:
            made = [await loop.create_connection(lambda: _Lane(self), HOST, port) for _ in range(self._job.connections)]
        except OSError as error:
            raise BenchError(f"{self._job.url} is not reachable ({error}); start the service first") from error
        lanes = [lane for _, lane in made]
        began = perf_counter()
        self._deadline = began + self._job.seconds
        for lane in lanes:
            lane.send_next()
        await asyncio.wait([lane.over for lane in lanes], timeout=self._job.seconds + DRAIN_SECONDS)
        for lane in lanes:
            lane.end("no answer")
        return self._summarize((self._last_answer or perf_counter()) - began)

    def next_request(self) -> bytes | None:
        """The next request, or None once time or count are used up."""
        if self.sent >= self._job.max_requests or perf_counter() >= self._deadline:
            return None
        self.sent += 1
        return next(self._requests)

    def record(self, began: float, answer: Answer) -> None:
        """One answer, complete by now. Only what is needed later is kept; it is parsed when nothing is measured."""
        now = perf_counter()
        if answer.status != 200:
            self.failures[f"status {answer.status}"] += 1
            return
        self._last_answer = now
        body = answer.body
        at = body.rfind(TIMINGS) if self._job.timings else -1
        self._answers.append((now - began, len(body), body[at + len(TIMINGS) : -1] if at >= 0 else b""))

    def _summarize(self, elapsed_seconds: float) -> Measurement:
        latencies: list[float] = []
        sizes: list[int] = []
        by_stage: dict[str, list[float]] = {stage: [] for stage in STAGES} if self._job.timings else {}
        for latency, size, raw in self._answers:
            if self._job.timings:
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
        return Measurement(self.sent, elapsed_seconds, latencies, sizes, by_stage, dict(self.failures))


class _Lane(asyncio.Protocol):
    """One connection: send, wait, send again. A connection that breaks is a failure and is not opened again."""

    _transport: asyncio.Transport

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._reader = ResponseReader()
        self._sent_at: float | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one in all but its ancestry.
        self._transport = cast(asyncio.Transport, transport)

    def send_next(self) -> None:
        if self.over.done():
            return
        request = self._run.next_request()
        if request is None:
            self.end(None)
        else:
            self._sent_at = perf_counter()
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
            if self._sent_at is None:
                raise BadAnswer("an answer that nobody asked for")
        except BadAnswer as error:
            self.end(f"bad answer: {error}")
            return
        if answer is not None:
            self._run.record(self._sent_at, answer)
            self._sent_at = None
            self.send_next()

    def connection_lost(self, error: Exception | None) -> None:
        self.end("connection lost")

    def end(self, failure: str | None) -> None:
        """The first call ends the lane; `failure` says why, None that its work is done."""
        if self.over.done():
            return
        if failure is not None:
            self._run.failures[failure] += 1
        self.over.set_result(None)
        self._transport.abort()


def main() -> int:
    """A job as JSON on standard input, its measurement as JSON on standard output."""
    return answer_apart(lambda job: asdict(drive(Job(**job))))


def answer_apart(run: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """The other end of `run_apart`."""
    # Nothing here makes cycles, and a collection in the middle would be counted as the server's latency.
    gc.disable()
    try:
        measured = run(json.load(sys.stdin))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    json.dump(measured, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
