"""Admission control and the job queue: equal jobs computed once, refusal by expected wait.

All but Dispatcher are plain data structures without threads or sockets.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.engine.batches import SLICE_SECONDS, CostModel, Lanes
from service.engine.jobs import EXPIRED, Job, Outcome
from service.errors import DeadlineExceeded, Overloaded, ShuttingDown

if TYPE_CHECKING:
    from service.serving.serving import Serving
    from service.settings import Settings

# Queries and tokens of one batch: a CPU gains nothing by more, a GPU is idle with less.
BATCHES = {"cpu": (8, 4096), "cuda": (256, 32_768)}
# Requests of one worker that are never refused for a long wait, however slow the encoder is. A GPU needs two batches
# of requests, from all workers together.
FEW_REQUESTS = 32
CROWD_BATCHES = 2
# A request of more jobs than this is bulk unless it says otherwise.
ONLINE_JOBS = 8
ROUNDING = 1e-6  # tolerance of the sum of shares: 32 requests of three jobs are 32.000000000000014 in floats
CROWDED = "too many queries are waiting; try again shortly"
EXPIRY_SECONDS = 0.05  # between two checks of deadlines while jobs are in flight

Future = asyncio.Future[Outcome]
OnBatch = Callable[[int, int, float, int], None]
"""Called after each batch with its size, tokens encoded, seconds and the number of queries that still wait."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a batch and of the queue, which holds at most `queue` waiting jobs.

    An online request is refused if its answer is expected later than `wait_seconds` and more requests than one batch or
    a `crowd` are in flight. So a few clients are never refused, however slow the encoder is.
    """

    batch_queries: int
    batch_tokens: int
    queue: int
    wait_seconds: float = math.inf
    crowd: int = 0

    @classmethod
    def from_settings(cls, settings: Settings) -> Limits:
        queries, tokens = BATCHES[settings.device]
        queries, tokens = settings.batch_queries or queries, settings.batch_tokens or tokens
        crowd = max(FEW_REQUESTS, CROWD_BATCHES * queries // settings.workers)
        return cls(queries, tokens, settings.queue_limit, settings.max_wait_ms / 1000, crowd)


@dataclass(slots=True)
class Entry:
    """A job in the queue or in the engine, with the futures that wait for it and their deadlines.

    `share` is its part of a request: the shares in flight add up to the number of requests.
    """

    serving: Serving
    job: Job
    bulk: bool
    share: float
    waiters: list[tuple[Future, float]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.job.load

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
    """The entries in flight: waiting or in the engine. Equal jobs of one serving and lane share an entry."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.cost = CostModel()
        self._limits = limits
        self._clock = clock
        self._lanes: Lanes[Entry] = Lanes(limits.batch_queries, limits.batch_tokens)
        self._in_flight: dict[tuple[Serving, Job, bool], Entry] = {}
        self._load = 0  # of what is in flight, in queries
        self._late: list[Entry] = []
        self._online_requests = 0.0
        self._others_until = self._began = 0.0
        self._under_way = 0
        self._crowd = max(limits.batch_queries, limits.crowd)

    def __len__(self) -> int:
        """Counts the waiting jobs, without those in the engine."""
        return len(self._lanes)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def enter(
        self,
        serving: Serving,
        jobs: Sequence[Job],
        futures: Sequence[Future],
        *,
        timeout_seconds: float = math.inf,
        bulk: bool = False,
        probe: bool = False,
    ) -> None:
        """Puts all jobs into their lane, or raises Overloaded."""
        if not probe:
            self.require_room(serving, jobs, timeout_seconds=timeout_seconds, bulk=bulk)
        deadline = self._clock() + timeout_seconds
        fresh: list[Entry] = []
        for job, future in zip(jobs, futures, strict=True):
            entry = self._in_flight.get((serving, job, bulk))
            if entry is None:
                entry = self._in_flight[serving, job, bulk] = Entry(serving, job, bulk, 1 / len(jobs))
                self._online_requests += 0 if bulk else entry.share
                self._load += entry.size
                fresh.append(entry)
            entry.waiters.append((future, deadline))
        if bulk:
            # Neighbours share a batch, and a batch of similar lengths holds little padding.
            fresh.sort(key=lambda entry: entry.length)
        self._lanes.add(fresh, bulk=bulk, first=probe)

    def require_room(
        self, serving: Serving, jobs: Sequence[Job], *, timeout_seconds: float = math.inf, bulk: bool = False
    ) -> None:
        """Raises Overloaded if `enter` would refuse these jobs; jobs that are in flight already cost nothing."""
        fresh = sum(job.load for job in jobs if (serving, job, bulk) not in self._in_flight)
        if self._rejection_delay(fresh, timeout_seconds, bulk=bulk) is None:
            return
        self._drop(self._lanes.drop_unwanted(self._clock()))
        if (expected := self._rejection_delay(fresh, timeout_seconds, bulk=bulk)) is not None:
            raise Overloaded(CROWDED, expected)

    def take(self, *, bulk: bool = True) -> list[Entry]:
        """Takes the next batch, of one serving; drops entries whose clients left or ran out of time."""
        now = self._clock()
        batch, dropped = self._lanes.take(now, self.cost.queries(SLICE_SECONDS), bulk=bulk)
        self._drop(dropped)
        self._began, self._under_way = now, sum(entry.size for entry in batch)
        return batch

    def leave(self, batch: Iterable[Entry]) -> int:
        """Removes entries, which the caller answers or fails; returns how many were in flight."""
        left = 0
        for entry in batch:
            # An equal entry may have come after everything was cleared.
            if self._in_flight.get(entry.key) is entry:
                del self._in_flight[entry.key]
                self._online_requests -= 0 if entry.bulk else entry.share
                self._load -= entry.size
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
                    future.set_exception(DeadlineExceeded(EXPIRED))
        self._late.clear()
        return bool(self._in_flight)

    def clear(self) -> list[Entry]:
        """Removes and returns everything in flight."""
        left = [*self._in_flight.values(), *self._late]
        self._in_flight.clear()
        self._late.clear()
        self._lanes.clear()
        self._online_requests = 0.0
        self._load = 0
        return left

    def _rejection_delay(self, fresh: int, timeout_seconds: float, *, bulk: bool) -> float | None:
        """Returns the expected seconds until `fresh` more jobs are done if that is too long, else None."""
        if not fresh:
            return None
        now, largest = self._clock(), self._limits.batch_queries
        # Bulk jobs that wait do not delay online ones.
        ahead = fresh + self._load - (0 if bulk else self._lanes.bulk_queries)
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
        # expire() fails their waiters: a future may be touched in the event loop's thread only.
        self.leave(entries)
        self._late += entries


class Dispatcher(ABC):
    """Takes jobs from requests, in the event loop. Subclasses compute the jobs."""

    def __init__(self, limits: Limits) -> None:
        self._queue = Queue(limits)
        # Guards the queue if an engine's thread shares it with the event loop.
        self._changed = threading.Condition(threading.Lock())
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Counts the waiting jobs, without those in the engine."""
        return len(self._queue)

    def start(self) -> None:
        """Begins to work for the running event loop."""
        self._loop = asyncio.get_running_loop()

    async def prepare(self, serving: Serving) -> None:  # noqa: B027 - most engines have nothing to prepare
        """Opens what the engine needs to answer from this serving; raises if it cannot."""

    def submit(
        self,
        serving: Serving,
        jobs: Sequence[Job],
        *,
        timeout_seconds: float = math.inf,
        bulk: bool = False,
        probe: bool = False,
    ) -> list[Future]:
        """Takes all jobs or none; returns one future per job, in order.

        A future fails with DeadlineExceeded after `timeout_seconds`. `bulk` jobs run when online ones leave room.
        A probe is taken even under overload, and goes first. Raises Overloaded, ShuttingDown, or EngineAway.
        """
        if self._closing:
            raise ShuttingDown("the service is shutting down; ask another instance")
        self._require_engine(serving)
        futures = [self._loop.create_future() for _ in jobs]
        with self._changed:
            self._queue.enter(serving, jobs, futures, timeout_seconds=timeout_seconds, bulk=bulk, probe=probe)
            self._wake()
        if timeout_seconds < math.inf and self._timer is None:
            self._timer = self._loop.call_later(EXPIRY_SECONDS, self._expire)
        return futures

    def require_room(self, serving: Serving, jobs: Sequence[Job], *, bulk: bool = False) -> None:
        """Raises Overloaded if `submit` would refuse these jobs now. Called before their texts are tokenised."""
        with self._changed:
            self._queue.require_room(serving, jobs, bulk=bulk)

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Accepts no more jobs, answers the accepted ones; after the timeout the rest fails."""
        with self._changed:
            self._closing = True
            self._wake()
        await self._drain(timeout_seconds)
        with self._changed:
            self._queue.expire()
            left = self._queue.clear()
        for entry in left:
            entry.fail(ShuttingDown("the service shut down before this query was answered"))
        if self._timer is not None:
            self._timer.cancel()

    def _require_engine(self, serving: Serving) -> None:  # noqa: B027 - an engine in this process is always there
        """Raises EngineAway if no engine can answer from this serving."""

    @abstractmethod
    def _wake(self) -> None:
        """Has the engine look at the queue; called with the lock held."""

    @abstractmethod
    async def _drain(self, timeout_seconds: float | None) -> None:
        """Waits until every accepted job is answered."""

    def _expire(self) -> None:
        with self._changed:
            left = self._queue.expire()
        self._timer = self._loop.call_later(EXPIRY_SECONDS, self._expire) if left else None
