"""One queue between the event loop and the engine's thread.

No timers: the thread wakes when a query arrives and takes what waits by then, so a lone query never lingers and a
crowd makes its own batches. Knows nothing of HTTP, tokens' meaning or what a serving holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.engine.protocol import BatchTimes, Engine, Found, Job
from service.errors import EngineFailed, Overloaded, ShuttingDown
from service.serving import Serving

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The engine's answer to one query, and what its batch spent."""

    found: Found
    times: BatchTimes


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a batch may grow, and how many queries may wait."""

    batch_queries: int
    batch_tokens: int
    queue: int


@dataclass(slots=True)
class _Entry:
    """A query in the queue or in the engine, with everyone who waits for it."""

    serving: Serving
    job: Job
    waiters: list[asyncio.Future[Outcome]] = field(default_factory=list)

    def abandoned(self) -> bool:
        return all(waiter.cancelled() for waiter in self.waiters)


class Batcher:
    """Takes queries from the event loop, answers their futures from one worker thread.

    Queries leave the queue in the order they came. Equal queries of one serving that are in flight at the same time
    are computed once. An entry whose waiters all left is dropped before work is spent on it.
    """

    def __init__(self, engine: Engine, limits: Limits, on_batch: Callable[[int], None] = lambda size: None) -> None:
        self._engine = engine
        self._limits = limits
        self._on_batch = on_batch
        self._queue: deque[_Entry] = deque()
        self._in_flight: dict[tuple[Serving, Job], _Entry] = {}
        # Guards the queue, the map and the lists of waiters: both threads touch them.
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="care-engine", daemon=True)

    def __len__(self) -> int:
        """Queries that wait, those in the engine not counted."""
        return len(self._queue)

    def start(self) -> None:
        """Starts the thread; its answers go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, serving: Serving, jobs: Sequence[Job], *, probe: bool = False) -> list[asyncio.Future[Outcome]]:
        """Queues all jobs or none; one future per job, in order.

        A probe is taken even when the queue is full, and goes first: the service's own question whether queries get
        through must not be answered by how many clients ask.
        """
        with self._changed:
            if self._closing:
                raise ShuttingDown("the service is shutting down; ask another instance")
            if not probe and not self._has_room(serving, jobs):
                self._drop_abandoned()
                if not self._has_room(serving, jobs):
                    raise Overloaded("too many queries are waiting; try again shortly")
            futures = [self._enter(serving, job, first=probe) for job in jobs]
            self._changed.notify()
        return futures

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Accepts nothing more, answers what waits, ends the thread. After the timeout the rest is refused."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            # The answers were posted to the loop before the thread ended, so they run before this await returns.
            await asyncio.to_thread(self._thread.join, timeout_seconds)
        with self._changed:
            left = list(self._in_flight.values())
            self._in_flight.clear()
        for entry in left:
            _refuse(entry, ShuttingDown("the service shut down before this query was answered"))

    def _enter(self, serving: Serving, job: Job, *, first: bool) -> asyncio.Future[Outcome]:
        entry = self._in_flight.get((serving, job))
        if entry is None:
            entry = _Entry(serving, job)
            self._in_flight[serving, job] = entry
            if first:
                self._queue.appendleft(entry)
            else:
                self._queue.append(entry)
        future: asyncio.Future[Outcome] = self._loop.create_future()
        entry.waiters.append(future)
        return future

    def _has_room(self, serving: Serving, jobs: Sequence[Job]) -> bool:
        fresh = sum((serving, job) not in self._in_flight for job in jobs)
        return len(self._queue) + fresh <= self._limits.queue

    def _drop_abandoned(self) -> None:
        self._queue = deque(entry for entry in self._queue if not self._forget_if_abandoned(entry))

    def _forget_if_abandoned(self, entry: _Entry) -> bool:
        if not entry.abandoned():
            return False
        self._in_flight.pop((entry.serving, entry.job), None)
        return True

    def _work(self) -> None:
        """The thread: one batch after another until the batcher closes and the queue is empty."""
        while self._run_batch():
            pass

    def _run_batch(self) -> bool:
        # A method of its own, so that a thread that waits holds no reference to the serving of its last batch.
        batch = self._next_batch()
        if not batch:
            return False
        try:
            self._on_batch(len(batch))
            found, times = self._engine.run(batch[0].serving, [entry.job for entry in batch])
            outcomes = [Outcome(one, times) for one in found]
            if len(outcomes) != len(batch):
                raise RuntimeError(f"the engine gave {len(outcomes)} answers to {len(batch)} queries")
        except BaseException as error:
            # A panic of a Rust library (tokenizers, tantivy) is no Exception; it must not end the thread either.
            logger.exception("a batch of %d queries failed", len(batch))
            self._post(self._fail, batch, error)
        else:
            self._post(self._answer, batch, outcomes)
        return True

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without a shutdown: nobody is left to answer
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _next_batch(self) -> list[_Entry]:
        """Waits for work and takes it; empty once the batcher is closing and drained."""
        with self._changed:
            while True:
                batch = self._take()
                if batch or (self._closing and not self._queue):
                    return batch
                self._changed.wait()

    def _take(self) -> list[_Entry]:
        """The head of the queue up to the limits, of one serving; entries that nobody waits for are dropped."""
        batch: list[_Entry] = []
        longest = 0
        while self._queue and len(batch) < self._limits.batch_queries:
            entry = self._queue[0]
            if self._forget_if_abandoned(entry):
                self._queue.popleft()
                continue
            length = max(longest, len(entry.job.tokens) if entry.job.tokens else 0)
            if batch and (
                entry.serving is not batch[0].serving or length * (len(batch) + 1) > self._limits.batch_tokens
            ):
                break
            longest = length
            batch.append(self._queue.popleft())
        return batch

    def _leave(self, batch: Sequence[_Entry]) -> None:
        with self._changed:
            for entry in batch:
                self._in_flight.pop((entry.serving, entry.job), None)

    def _answer(self, batch: Sequence[_Entry], outcomes: Sequence[Outcome]) -> None:
        self._leave(batch)
        for entry, outcome in zip(batch, outcomes, strict=True):
            for waiter in entry.waiters:
                if not waiter.done():
                    waiter.set_result(outcome)

    def _fail(self, batch: Sequence[_Entry], cause: BaseException) -> None:
        self._leave(batch)
        for entry in batch:
            _refuse(entry, EngineFailed("the search engine failed on this query; try again"), cause)


def _refuse(entry: _Entry, error: Exception, cause: BaseException | None = None) -> None:
    for waiter in entry.waiters:
        if not waiter.done():
            # One exception object per waiter: each raise writes its own traceback into it.
            own = type(error)(*error.args)
            own.__cause__ = cause
            waiter.set_exception(own)
