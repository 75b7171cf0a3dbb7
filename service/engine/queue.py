"""Who waits for the engine, and who is let in at all: jobs by how long they would wait, not only by how many wait.

A plain data structure: no threads, no sockets. Knows nothing of HTTP, tokens' meaning or what a serving holds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from service.engine.cost import CostModel
from service.engine.lanes import SLICE_SECONDS, Lanes
from service.engine.pressure import Pressure
from service.engine.protocol import Job, Outcome
from service.errors import DeadlineExceeded, Overloaded
from service.serving import Serving

# A request of more jobs than this is bulk unless it says otherwise.
ONLINE_JOBS = 8
# What is left of the allowed wait, and of the jobs that are always let in, while far more arrives than is done. Many
# would be refused anyway, and a queue would only make the others wait.
SHARE_UNDER_PRESSURE = 0.1
JOBS_UNDER_PRESSURE = 1

CROWDED = "too many queries are waiting; try again shortly"

Future = asyncio.Future[Outcome]


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a batch may grow, and how much may wait.

    Online jobs are refused once they would be answered later than `wait_seconds`, unless all that is there fits one
    batch, or is no more than a `crowd` that came at once; under pressure all of it shrinks, so that whoever is let in
    is answered soon. `queue` bounds both lanes together.
    """

    batch_queries: int
    batch_tokens: int
    queue: int
    wait_seconds: float = math.inf
    crowd: int = 0


@dataclass(slots=True)
class Entry:
    """A job in the queue or in the engine, with everyone who waits for it and until when they do."""

    serving: Serving
    job: Job
    bulk: bool
    entered: float
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
        self._pressure = Pressure()
        self._others_until = self._began = 0.0
        self._under_way = 0
        self._at_once = max(limits.batch_queries, limits.crowd)

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
        seconds = math.inf if timeout_seconds is None else timeout_seconds
        bulk = len(jobs) > ONLINE_JOBS if bulk is None else bulk
        if not bulk:
            self._pressure.arrive(len(jobs), self._clock())
        if not probe and self._too_long_for(serving, jobs, bulk, seconds) is not None:
            now = self._clock()
            self._drop(self._lanes.drop(lambda entry: not entry.is_wanted(now)))
            if (expected := self._too_long_for(serving, jobs, bulk, seconds)) is not None:
                raise Overloaded(CROWDED, expected)
        now = self._clock()
        deadline = now + seconds
        fresh: list[Entry] = []
        for job, future in zip(jobs, futures, strict=True):
            entry = self._in_flight.get((serving, job, bulk))
            if entry is None:
                entry = self._in_flight[serving, job, bulk] = Entry(serving, job, bulk, math.inf if probe else now)
                fresh.append(entry)
            entry.waiters.append((future, deadline))
        if bulk:
            # Neighbours share a batch, and a batch of like lengths holds little padding.
            fresh.sort(key=lambda entry: entry.length)
        self._lanes.add(fresh, bulk=bulk, first=probe)

    def require_room(self, inside: int = 0, unasked: int = 0) -> None:
        """Raises Overloaded where a lone online job would find no room, joining another not considered.

        Of the requests `inside`, those whose jobs are not here yet will come before it; `unasked` others were refused
        already. Whoever came before the flood was seen to be one, and still waits, is refused with it. To be called
        where futures may be touched.
        """
        now = self._clock()
        self._pressure.arrive(unasked, now)
        fresh = 1 + max(0, inside - self._ahead(0, bulk=False))
        expected = self._too_long(fresh, now, bulk=False, timeout_seconds=math.inf)
        if expected is None:
            return
        self._pressure.arrive(1, now)
        if self._lanes.online_queries and self._is_pressed(now):
            self._refuse_late(now - self._limits.wait_seconds * SHARE_UNDER_PRESSURE)
        raise Overloaded(CROWDED, expected)

    def take(self, *, bulk: bool = True) -> list[Entry]:
        """The next batch, of one serving, empty where nothing waits; what nobody waits for any more is dropped."""
        now = self._clock()
        batch, dropped = self._lanes.take(now, self.cost.queries(SLICE_SECONDS), bulk=bulk)
        self._drop(dropped)
        self._began, self._under_way = now, len(batch)
        return batch

    def leave(self, batch: Iterable[Entry]) -> int:
        """Forgets entries, which the caller answers or fails; returns how many were in flight."""
        left = self._forget(batch)
        self._pressure.finish(sum(not entry.bulk for entry in left), self._clock())
        return len(left)

    def others_wait(self, queries: int) -> None:
        """Says that an engine which others ask too has so many of their queries before it."""
        self._others_until = self._clock() + self.cost.seconds(queries, self._limits.batch_queries)

    def expire(self) -> bool:
        """Fails the waiters whose time is up; says whether anything is left that may expire later."""
        now = self._clock()
        for entry in (*self._in_flight.values(), *self._late):
            for future, deadline in entry.waiters:
                if deadline <= now and not future.done():
                    future.set_exception(DeadlineExceeded("the time for this request is over; allow it more"))
        self._late.clear()
        return bool(self._in_flight)

    def clear(self) -> list[Entry]:
        """Everything in flight, forgotten."""
        left = [*self._in_flight.values(), *self._late]
        self._in_flight.clear()
        self._late.clear()
        self._lanes.clear()
        return left

    def _too_long_for(self, serving: Serving, jobs: Sequence[Job], bulk: bool, timeout_seconds: float) -> float | None:
        """As `_too_long`, for jobs of which some may join others that are in flight."""
        now = self._clock()
        if self._too_long(len(jobs), now, bulk, timeout_seconds) is None:
            return None
        fresh = sum((serving, job, bulk) not in self._in_flight for job in jobs)
        return self._too_long(fresh, now, bulk, timeout_seconds) if fresh else None

    def _too_long(self, fresh: int, now: float, bulk: bool, timeout_seconds: float) -> float | None:
        """The seconds until some fresh jobs would be done, where that is too long for them to be let in."""
        ahead, largest = self._ahead(fresh, bulk), self._limits.batch_queries
        others = max(0.0, self._others_until - now)
        spent = min(now - self._began, self.cost.seconds(self._under_way, largest))
        expected = self.cost.seconds(ahead, largest) - spent + others
        if len(self._lanes) + fresh > self._limits.queue:
            return expected
        at_once, allowed = self._at_once, self._limits.wait_seconds
        if bulk:
            allowed = math.inf
        elif self._is_pressed(now):
            at_once, allowed = JOBS_UNDER_PRESSURE, allowed * SHARE_UNDER_PRESSURE
        fits = ahead <= at_once and not others
        return None if fits or expected <= min(timeout_seconds, allowed) else expected

    def _is_pressed(self, now: float) -> bool:
        return self._pressure.is_high(now, slack=max(self._at_once, self.cost.usual(self._limits.wait_seconds)))

    def _refuse_late(self, since: float) -> None:
        """Refuses the online jobs that wait since before then."""
        late = self._lanes.drop(lambda entry: entry.entered < since, bulk=False)
        self._forget(late)
        for entry in late:
            entry.fail(Overloaded(CROWDED))

    def _ahead(self, fresh: int, bulk: bool) -> int:
        """Jobs to compute until the last of some fresh ones is done: bulk jobs that wait do not hold up online ones."""
        return fresh + len(self._in_flight) - (0 if bulk else self._lanes.bulk_queries)

    def _drop(self, entries: Sequence[Entry]) -> None:
        # Whoever still waits is told by expire(): a future may be touched in the event loop's thread only.
        self._forget(entries)
        self._late += entries

    def _forget(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of the entries that were in flight: the like of one may have come after everything was cleared."""
        left = [entry for entry in entries if self._in_flight.get(entry.key) is entry]
        for entry in left:
            del self._in_flight[entry.key]
        return left
