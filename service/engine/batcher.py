"""One queue between the event loop and an engine in this process, which runs in a thread of its own.

No timers between a query and the engine: the thread wakes when a query arrives and takes what waits by then, so a lone
query never lingers and a crowd makes its own batches. Knows nothing of HTTP, tokens' meaning or what a serving holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from time import perf_counter

from indexer.errors import BadCollection, DatabaseAway
from service.engine.expiry import Expiry
from service.engine.protocol import Engine, Job, OnBatch, Outcome
from service.engine.queue import Entry, Limits, Queue
from service.errors import EngineFailed, ShuttingDown
from service.serving import Serving

logger = logging.getLogger(__name__)

# What an engine raises that is no fault of its own: whoever asked learns the reason.
TOLD = (BadCollection, DatabaseAway)


class Batcher:
    """Takes jobs from the event loop, answers their futures from one worker thread."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        on_batch: OnBatch = lambda size, seconds, waiting: None,
    ) -> None:
        self._engine = engine
        self._on_batch = on_batch
        self._queue = Queue(limits)
        # Guards the queue and everything in it: both threads touch it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._expiry = Expiry(self._expire)
        self._thread = threading.Thread(target=self._work, name="care-engine", daemon=True)

    def __len__(self) -> int:
        """Jobs that wait, those in the engine not counted."""
        return len(self._queue)

    def start(self) -> None:
        """Starts the thread; its answers go to the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(
        self,
        serving: Serving,
        jobs: Sequence[Job],
        *,
        timeout_seconds: float | None = None,
        bulk: bool | None = None,
        probe: bool = False,
    ) -> list[asyncio.Future[Outcome]]:
        """See Dispatcher."""
        futures = [self._loop.create_future() for _ in jobs]
        with self._changed:
            if self._closing:
                raise ShuttingDown("the service is shutting down; ask another instance")
            self._queue.enter(serving, jobs, futures, timeout_seconds=timeout_seconds, bulk=bulk, probe=probe)
            self._changed.notify()
        if timeout_seconds is not None:
            self._expiry.watch()
        return futures

    async def prepare(self, serving: Serving) -> None:
        """Nothing: a serving of this process is open already."""

    def require_room(self, serving: Serving, jobs: Sequence[Job], *, bulk: bool | None = None) -> None:
        """See Dispatcher."""
        with self._lock:
            self._queue.require_room(serving, jobs, bulk=bulk)

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Accepts nothing more, answers what waits, ends the thread. After the timeout the rest is refused."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.is_alive():
            # The answers were posted to the loop before the thread ended, so they run before this await returns.
            await asyncio.to_thread(self._thread.join, timeout_seconds)
        with self._changed:
            self._queue.expire()
            left = self._queue.clear()
        for entry in left:
            entry.fail(ShuttingDown("the service shut down before this query was answered"))
        self._expiry.cancel()

    def _expire(self) -> bool:
        with self._changed:
            return self._queue.expire()

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
            began = perf_counter()
            outcomes = self._engine.run(batch[0].serving, [entry.job for entry in batch])
            seconds = perf_counter() - began
            if len(outcomes) != len(batch):
                raise RuntimeError(f"the engine gave {len(outcomes)} answers to {len(batch)} queries")
            self._on_batch(len(batch), seconds, len(self._queue))
        except DatabaseAway as error:
            self._post(self._fail, batch, error)
        except BaseException as error:
            # A panic of a Rust library (tokenizers, tantivy) is no Exception; it must not end the thread either.
            logger.exception("a batch of %d queries failed", len(batch))
            self._post(self._fail, batch, error)
        else:
            self._post(self._answer, batch, outcomes, seconds)
        return True

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without a shutdown: nobody is left to answer
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _next_batch(self) -> list[Entry]:
        """Waits for work and takes it; empty once the batcher is closing and drained."""
        with self._changed:
            while True:
                batch = self._queue.take()
                if batch or (self._closing and not len(self._queue)):
                    return batch
                self._changed.wait()

    def _answer(self, batch: Sequence[Entry], outcomes: Sequence[Outcome], seconds: float) -> None:
        with self._changed:
            self._queue.leave(batch)
            self._queue.cost.observe(len(batch), seconds)
        for entry, outcome in zip(batch, outcomes, strict=True):
            entry.answer(outcome)

    def _fail(self, batch: Sequence[Entry], cause: BaseException) -> None:
        with self._changed:
            self._queue.leave(batch)
        failed = EngineFailed("the search engine failed on this query; try again")
        for entry in batch:
            entry.fail(cause if isinstance(cause, TOLD) else failed, cause)
