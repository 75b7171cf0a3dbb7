"""A load that does not wait: so many searches a second, whatever the service does. `flood(offer)` runs it apart.

Requests are due at even intervals and are written to connections that are open already; one that finds none free when
it is due is counted and never sent, so what is under way stays bounded. Each answer is an accepted search (200), a
refusal (429, with or without Retry-After) or a failure. HTTP/1.1 to 127.0.0.1 only, like the closed loop of `client`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import cast

import uvloop

from loadtest.harness.client import DRAIN_SECONDS, MAX_SECONDS, Job, answer_apart, run_apart, write_requests
from loadtest.harness.errors import BenchError
from loadtest.harness.http1 import HOST, Answer, BadAnswer, ResponseReader, port_of

MAX_CONNECTIONS = 512
MAX_PER_SECOND = 20_000
TICK_SECONDS = 0.001
RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*\d+[ \t]*\r\n", re.IGNORECASE)


RESULTS = b'{"results":'


@dataclass(frozen=True, slots=True)
class Offer:
    """What is offered to whom: `per_second` searches for `seconds`, numbered on from `first_number`."""

    url: str
    queries: Sequence[str]
    mode: str
    per_second: float
    seconds: float
    connections: int = MAX_CONNECTIONS
    first_number: int = 0

    def __post_init__(self) -> None:
        bounds = {"connections": MAX_CONNECTIONS, "seconds": MAX_SECONDS, "per_second": MAX_PER_SECOND}
        for name, most in bounds.items():
            if not 0 < getattr(self, name) <= most:
                raise BenchError(f"{name} must be above 0 and at most {most}, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Flood:
    """What came of an offer; times in milliseconds, from writing a request to the last byte of its answer.

    `unsent` found every connection busy. `late_ms` is how much later than due each was written: what the generator
    itself lagged.
    """

    seconds: float
    unsent: int = 0
    accepted_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    without_retry_after: int = 0
    late_ms: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def sent(self) -> int:
        return len(self.late_ms)


def flood(offer: Offer) -> Flood:
    """Runs the offer in a process of its own."""
    return Flood(**run_apart("loadtest.harness.open_loop", asdict(offer), offer.seconds))


def drive(offer: Offer) -> Flood:
    """Runs the offer in this process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Run(offer).run())


class _Run:
    """The state that the connections of one offer share."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        asked = Job(offer.url, offer.queries, offer.mode, 1, offer.seconds, offer.first_number)
        self._requests = write_requests(asked)
        # The longest idle one first, so that none idles long enough for the server to close it.
        self._free: deque[_Lane] = deque()
        self._accepted: list[float] = []
        self._refused: list[float] = []
        self._late: list[float] = []
        self._unsent = self._without_retry_after = 0
        self.failures: Counter[str] = Counter()

    async def run(self) -> Flood:
        loop = asyncio.get_running_loop()
        port, number = port_of(self._offer.url), self._offer.connections
        try:
            made = [await loop.create_connection(lambda: _Lane(self), HOST, port) for _ in range(number)]
        except OSError as error:
            raise BenchError(f"{self._offer.url} is not reachable ({error}); start the service first") from error
        lanes = [lane for _, lane in made]
        self._free = deque(lanes)
        began = perf_counter()
        await self._send_all(began)
        seconds = perf_counter() - began
        give_up = perf_counter() + DRAIN_SECONDS
        while any(lane.busy for lane in lanes) and perf_counter() < give_up:
            await asyncio.sleep(TICK_SECONDS)
        for lane in lanes:
            lane.end("no answer")
        return self._summarize(seconds)

    async def _send_all(self, began: float) -> None:
        interval = 1 / self._offer.per_second
        whole = int(self._offer.per_second * self._offer.seconds)
        number = 0
        while number < whole:
            now = perf_counter()
            due = min(whole, int((now - began) / interval) + 1)
            for one in range(number, due):
                if not self._free:
                    self._unsent += due - one
                    break
                self._late.append((now - began - one * interval) * 1000)
                self._free.popleft().send(next(self._requests))
            number = due
            await asyncio.sleep(TICK_SECONDS)

    def record(self, lane: _Lane, began: float, answer: Answer) -> None:
        """One complete answer; what it says is parsed when the load is over."""
        latency_ms = (perf_counter() - began) * 1000
        self._free.append(lane)
        if answer.status == 200 and not answer.body.startswith(RESULTS):
            self.failures["no results"] += 1
        elif answer.status == 200:
            self._accepted.append(latency_ms)
        elif answer.status == 429:
            self._refused.append(latency_ms)
            self._without_retry_after += RETRY_AFTER.search(answer.head) is None
        else:
            self.failures[f"status {answer.status}"] += 1

    def drop(self, lane: _Lane) -> None:
        if lane in self._free:
            self._free.remove(lane)

    def _summarize(self, seconds: float) -> Flood:
        return Flood(
            seconds,
            self._unsent,
            self._accepted,
            self._refused,
            self._without_retry_after,
            self._late,
            dict(self.failures),
        )


class _Lane(asyncio.Protocol):
    """One connection, used again and again; one that breaks is not opened again."""

    _transport: asyncio.Transport

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._reader = ResponseReader()
        self._sent_at = 0.0
        self._ended = False
        self.busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one in all but its ancestry.
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes) -> None:
        self.busy = True
        self._sent_at = perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
        except BadAnswer as error:
            self.end(f"bad answer: {error}")
            return
        if answer is not None:
            self.busy = False
            self._run.record(self, self._sent_at, answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.end("connection lost")

    def end(self, failure: str) -> None:
        """The first call ends the lane; `failure` is what becomes of a request that is under way."""
        if self._ended:
            return
        if self.busy:
            self._run.failures[failure] += 1
        self._ended, self.busy = True, False
        self._run.drop(self)
        self._transport.abort()


def main() -> int:
    """An offer as JSON on standard input, what came of it as JSON on standard output."""
    return answer_apart(lambda offer: asdict(drive(Offer(**offer))))


if __name__ == "__main__":
    sys.exit(main())
