"""Client of the engine process: sends a worker's jobs over the socket and ranks the responses.

The engine forms the batches, from the queries of all workers. Only bulk jobs wait here; one slice of them is sent at a
time. Meanwhile a thread of the worker searches by words, which needs no device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from indexer.errors import DatabaseAway
from indexer.store.arrays import Scores
from service.engine.jobs import DATABASE_AWAY, ENGINE_FAILED, EXPIRED, BatchTimes, Response, SearchJob, Status
from service.engine.queue import Dispatcher, Entry, Limits
from service.engine.ranking import PendingJob, Side, group_jobs, make_request, search_lexical
from service.engine.remote.link import Link
from service.errors import DeadlineExceeded, EngineAway, EngineFailed
from service.serving.serving import Serving

logger = logging.getLogger(__name__)

AWAY = "the engine process is not there; it is being started again"
FAILED = EngineFailed(ENGINE_FAILED)
FAILURES = {Status.EXPIRED: DeadlineExceeded(EXPIRED), Status.DATABASE_AWAY: DatabaseAway(DATABASE_AWAY)}
T = TypeVar("T")


class RemoteEngine(Dispatcher):
    """The dispatcher of a worker beside an engine process. Runs in the event loop, but for words and fresh passages."""

    def __init__(self, path: Path, limits: Limits, on_waiting: Callable[[int], None] = lambda queries: None) -> None:
        """`on_waiting` gets the number of waiting jobs each time that some were sent."""
        super().__init__(limits)
        self._path = path
        self._on_waiting = on_waiting
        self.on_refused: Callable[[], Awaitable[None]] = _do_nothing
        self._words = ThreadPoolExecutor(1, "care-words")
        self._fresh = ThreadPoolExecutor(1, "care-fresh")
        self._sent: dict[int, list[PendingJob]] = {}
        self._numbers = count(1)
        self._bulk_under_way = 0
        self._pumping = False

    def start(self) -> None:
        super().start()
        self._drained = asyncio.Event()
        self._link = Link(self._path, self._receive, self._lose, lambda: self.on_refused())
        self._link.start()

    async def prepare(self, serving: Serving) -> None:
        await self._link.open(serving)

    async def close(self, timeout_seconds: float | None = None) -> None:
        await super().close(timeout_seconds)
        await self._link.close()
        for threads in (self._words, self._fresh):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _drain(self, timeout_seconds: float | None) -> None:
        self._drained.clear()
        if self._queue.in_flight:
            try:
                await asyncio.wait_for(self._drained.wait(), timeout_seconds)
            except TimeoutError:
                logger.warning("%d queries were not answered in time", self._queue.in_flight)

    def _require_engine(self, serving: Serving) -> None:
        if self._link.handle_of(serving) is None:
            raise EngineAway(AWAY)

    def _wake(self) -> None:
        # Not at once: what else arrives in this turn of the loop goes into the same frame.
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Sends every online job, and a slice of the bulk jobs if none is under way."""
        self._pumping = False
        while batch := self._queue.take(bulk=not self._bulk_under_way):
            times = BatchTimes()
            self._bulk_under_way += sum(entry.bulk for entry in batch)
            pending = [PendingJob.begin(entry, times) for entry in batch]
            self._send(batch[0].serving, [one for one in pending if one.dense is None])
            if words := [one for one in pending if one.lexical is None]:
                self._call_in(
                    self._words,
                    words,
                    "a search for words failed",
                    partial(_search_words, words),
                    partial(self._take_words, words),
                )
        self._on_waiting(len(self._queue))

    def _call_in(
        self,
        threads: ThreadPoolExecutor,
        pending: Sequence[PendingJob],
        failure: str,
        function: Callable[[], T],
        then: Callable[[T], None],
    ) -> None:
        """Runs a function in a thread and passes its result to `then`; if it raises, the pending jobs fail."""

        def done(future: asyncio.Future[T]) -> None:
            if future.cancelled():
                return
            if (error := future.exception()) is not None:
                logger.error(failure, exc_info=error)
                self._fail(pending, FAILED)
            else:
                then(future.result())

        self._loop.run_in_executor(threads, function).add_done_callback(done)

    def _send(self, serving: Serving, pending: Iterable[PendingJob]) -> None:
        """Sends jobs to the engine, those of one key in one frame."""
        handle = self._link.handle_of(serving)
        for key, together in group_jobs(pending).items():
            if handle is None:
                self._fail(together, EngineAway(AWAY))
                continue
            number = next(self._numbers)
            try:
                self._link.send(make_request(key, together, number, handle))
            except Exception:
                logger.exception("%d queries could not be sent to the engine", len(together))
                self._fail(together, FAILED)
            else:
                self._sent[number] = together

    def _receive(self, response: Response) -> None:
        """Takes the engine's response to one request."""
        sent = self._sent.pop(response.number, [])
        if response.batch:
            self._queue.cost.observe(response.batch, response.times.encode_seconds + response.times.search_seconds)
            self._queue.others_wait(max(0, response.waiting - self._queue.in_flight))
        if response.status is Status.DONE:
            overlay = sent[0].entry.serving.fresh if sent and sent[0].k else None
            if overlay is None:
                self._take_dense(sent, response)
            else:
                # In a thread: at the limit of fresh passages a batch of queries takes tens of milliseconds.
                self._call_in(
                    self._fresh,
                    sent,
                    "fresh passages could not be scored",
                    partial(overlay.score_vectors, response.vectors),
                    partial(self._take_dense, sent, response),
                )
        else:
            self._fail(sent, FAILURES.get(response.status, FAILED))

    def _take_dense(self, sent: Sequence[PendingJob], response: Response, fresh: Scores | None = None) -> None:
        for position, one in enumerate(sent):
            one.times.encode_seconds = max(one.times.encode_seconds, response.times.encode_seconds)
            one.times.search_seconds = max(one.times.search_seconds, response.times.search_seconds)
            one.take_dense(response, position, None if fresh is None else fresh[position])
            self._settle(one)
        if again := [one for one in sent if one.dense is None]:
            self._send(again[0].entry.serving, again)

    def _take_words(self, pending: Sequence[PendingJob], found: tuple[list[Side], float]) -> None:
        sides, seconds = found
        for one, side in zip(pending, sides, strict=True):
            one.lexical, one.times.search_seconds = side, max(one.times.search_seconds, seconds)
            self._settle(one)

    def _settle(self, one: PendingJob) -> None:
        """Answers a job once both sides are there."""
        if one.dense is None or one.lexical is None:
            return
        try:
            outcome = one.outcome()
        except Exception:
            logger.exception("a ranking failed")
            self._fail([one], FAILED)
        else:
            self._leave(one.entry)
            one.entry.answer(outcome)

    def _fail(self, pending: Iterable[PendingJob], error: Exception) -> None:
        for one in pending:
            self._leave(one.entry)
            one.entry.fail(error)

    def _leave(self, entry: Entry) -> None:
        if self._queue.leave([entry]) and entry.bulk:
            self._bulk_under_way -= 1
            if not self._bulk_under_way:
                self._wake()
        if not self._queue.in_flight:
            self._drained.set()

    def _lose(self) -> None:
        """Fails everything in flight: the connection is gone."""
        self._sent.clear()
        self._bulk_under_way = 0
        for entry in self._queue.clear():
            entry.fail(EngineAway(AWAY))
        self._drained.set()


async def _do_nothing() -> None:
    pass


def _search_words(pending: Sequence[PendingJob]) -> tuple[list[Side], float]:
    """Returns the lexical side of each job, and the seconds that all took together."""
    began = perf_counter()
    entries = [one.entry for one in pending]
    sides = [search_lexical(entry.serving, entry.job) for entry in entries if isinstance(entry.job, SearchJob)]
    return sides, perf_counter() - began
