"""Admission control and the job queue: a job is refused if it would wait too long behind too many requests.

A plain data structure without threads or sockets.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from service.engine.cost import CostModel
from service.engine.lanes import SLICE_SECONDS, Lanes
from service.engine.protocol import Job, Outcome
from service.errors import DeadlineExceeded, Overloaded
from service.serving.serving import Serving

# A request of more jobs than this is bulk unless it says otherwise.
ONLINE_JOBS = 8
# Tolerance of the sum of shares: 32 requests of three jobs are 32.000000000000014 in floats.
ROUNDING = 1e-6
CROWDED = "too many queries are waiting; try again shortly"

Future = asyncio.Future[Outcome]


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a batch may grow, and how much may wait.

    An online request is refused if its answer is expected later than `wait_seconds`, and if more requests than one
    batch or a `crowd` are in flight. The second condition means that a few clients are never refused, however slow the
    encoder is. `queue` bounds the waiting jobs of both lanes together.
    """

    batch_queries: int
    batch_tokens: int
    queue: int
    wait_seconds: float = math.inf
    crowd: int = 0


@dataclass(slots=True)
class Entry:
    """A job in the queue or in the engine, with the futures that wait for it and their deadlines.

    `share` is the part of its request that the job is: the shares in flight add up to the number of requests.
    """

    serving: Serving
    job: Job
    bulk: bool
    share: float
    waiters: list[tuple[Future, float]] = field(default_factory=list)
    size: int = 1

    @property
    def key(self) -> tuple[Serving, Job, bool]:
        return self.serving, self.job, self.bulk

    @property
    def length(self) -> int:
        return len(self.job.tokens) if self.job.tokens else 0

    def is_wanted(self, now: float) -> bool:
        return any(deadline > now and not future.done() for future, deadline in self.waiters)

    def answer(self, outcome: Outcome) -> None:
        for future, _ in self.waiters:
            if not future.done():
                future.set_result(outcome)

    def fail(self, error: Exception, cause: BaseException | None = None) -> None:
        for future, _ in self.waiters:
            if not future.done():
                # One exception object per waiter: each raise writes its own traceback into it.
                own = type(error)(*error.args)
                own.__cause__ = cause
                future.set_exception(own)


class Queue:
    """The entries in flight, those in the engine and those that wait. Equal jobs of one serving and lane share one."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.cost = CostModel()
        self._limits = limits
        self._clock = clock
        self._lanes: Lanes[Entry] = Lanes(limits.batch_queries, limits.batch_tokens)
        self._in_flight: dict[tuple[Serving, Job, bool], Entry] = {}
        self._late: list[Entry] = []
        self._online_requests = 0.0
        self._others_until = self._began = 0.0
        self._under_way = 0
        self._crowd = max(limits.batch_queries, limits.crowd)

    def __len__(self) -> int:
        """Jobs that wait, those in the engine not counted."""
        return len(self._lanes)

    @property
    def in_flight(self) -> int:
        """Jobs that wait and jobs in the engine."""
        return len(self._in_flight)

    def enter(
        self,
        serving: Serving,
        jobs: Sequence[Job],
        futures: Sequence[Future],
        *,
        timeout_seconds: float | None = None,
        bulk: bool | None = None,
        probe: bool = False,
    ) -> None:
        """Puts all jobs into their lane, or raises Overloaded."""
        bulk = len(jobs) > ONLINE_JOBS if bulk is None else bulk
        if not probe:
            self.require_room(serving, jobs, timeout_seconds=timeout_seconds, bulk=bulk)
        deadline = math.inf if timeout_seconds is None else self._clock() + timeout_seconds
        fresh: list[Entry] = []
        for job, future in zip(jobs, futures, strict=True):
            entry = self._in_flight.get((serving, job, bulk))
            if entry is None:
                entry = self._in_flight[serving, job, bulk] = Entry(serving, job, bulk, 1 / len(jobs))
                self._online_requests += 0 if bulk else entry.share
                fresh.append(entry)
            entry.waiters.append((future, deadline))
        if bulk:
            # Neighbours share a batch, and a batch of like lengths holds little padding.
            fresh.sort(key=lambda entry: entry.length)
        self._lanes.add(fresh, bulk=bulk, first=probe)

    def require_room(
        self, serving: Serving, jobs: Sequence[Job], *, timeout_seconds: float | None = None, bulk: bool | None = None
    ) -> None:
        """Raises Overloaded if `enter` would refuse these jobs; jobs that are in flight already cost nothing."""
        bulk = len(jobs) > ONLINE_JOBS if bulk is None else bulk
        seconds = math.inf if timeout_seconds is None else timeout_seconds
        fresh = sum((serving, job, bulk) not in self._in_flight for job in jobs)
        if self._rejection_delay(fresh, seconds, bulk=bulk) is None:
            return
        now = self._clock()
        self._drop(self._lanes.drop(lambda entry: not entry.is_wanted(now)))
        if (expected := self._rejection_delay(fresh, seconds, bulk=bulk)) is not None:
            raise Overloaded(CROWDED, expected)

    def take(self, *, bulk: bool = True) -> list[Entry]:
        """Takes the next batch, of one serving; drops entries whose clients left or ran out of time."""
        now = self._clock()
        batch, dropped = self._lanes.take(now, self.cost.queries(SLICE_SECONDS), bulk=bulk)
        self._drop(dropped)
        self._began, self._under_way = now, len(batch)
        return batch

    def leave(self, batch: Iterable[Entry]) -> int:
        """Removes entries, which the caller answers or fails; returns how many were in flight."""
        left = 0
        for entry in batch:
            # An equal entry may have come after everything was cleared.
            if self._in_flight.get(entry.key) is entry:
                del self._in_flight[entry.key]
                self._online_requests -= 0 if entry.bulk else entry.share
                left += 1
        return left

    def others_wait(self, queries: int) -> None:
        """Records the queries of other workers that wait in a shared engine and delay the jobs of this one."""
        self._others_until = self._clock() + self.cost.seconds(queries, self._limits.batch_queries)

    def expire(self) -> bool:
        """Fails the waiters whose deadline has passed; returns whether anything is left that may expire later."""
        now = self._clock()
        for entry in (*self._in_flight.values(), *self._late):
            for future, deadline in entry.waiters:
                if deadline <= now and not future.done():
                    future.set_exception(DeadlineExceeded("the time for this request is over; allow it more"))
        self._late.clear()
        return bool(self._in_flight)

    def clear(self) -> list[Entry]:
        """Removes and returns everything in flight."""
        left = [*self._in_flight.values(), *self._late]
        self._in_flight.clear()
        self._late.clear()
        self._lanes.clear()
        self._online_requests = 0.0
        return left

    def _rejection_delay(self, fresh: int, timeout_seconds: float, *, bulk: bool) -> float | None:
        """Returns the expected seconds until `fresh` more jobs are done if that is too long, else None."""
        if not fresh:
            return None
        now, largest = self._clock(), self._limits.batch_queries
        # Bulk jobs that wait do not delay online ones.
        ahead = fresh + len(self._in_flight) - (0 if bulk else self._lanes.bulk_queries)
        spent = min(now - self._began, self.cost.seconds(self._under_way, largest))
        expected = self.cost.seconds(ahead, largest) - spent + max(0.0, self._others_until - now)
        if len(self._lanes) + fresh > self._limits.queue:
            return expected
        if ahead > self._crowd and expected > timeout_seconds:
            return expected
        if bulk or self._online_requests + 1 <= self._crowd + ROUNDING:
            return None
        return expected if expected > self._limits.wait_seconds else None

    def _drop(self, entries: Sequence[Entry]) -> None:
        # expire() tells their waiters: a future may be touched in the event loop's thread only.
        self.leave(entries)
        self._late += entries
