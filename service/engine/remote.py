"""A worker's half of the engine process: jobs go over the socket as they come, and come back as rankings.

The engine makes the batches, out of all workers' queries; here nothing waits but bulk jobs, one slice of which is under
way at a time. What needs no device stays here: a thread searches the words meanwhile, and both sides are ranked when
they are there. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

from indexer.errors import DatabaseAway
from service.engine.expiry import Expiry
from service.engine.frames import Answer, Status
from service.engine.link import Link
from service.engine.pending import Likeness, Pending, Trip, write_ask
from service.engine.protocol import Job, Outcome, SearchJob
from service.engine.queue import Entry, Limits, Queue
from service.engine.ranking import Scores, Side, search_lexical
from service.errors import DeadlineExceeded, EngineAway, EngineFailed, ShuttingDown
from service.serving import Serving

logger = logging.getLogger(__name__)

AWAY = "the engine process is not there; it is being started again"
DATABASE_AWAY = "the vector database does not answer; try again when it is back"
FAILED = "the search engine failed on this query; try again"


class RemoteEngine:
    """The dispatcher of a worker that does not compute. Everything but the search for words runs in the event loop."""

    def __init__(self, path: Path, limits: Limits, on_waiting: Callable[[int], None] = lambda queries: None) -> None:
        """`on_waiting` hears how many jobs wait here, each time that some were sent."""
        self._path = path
        self._on_waiting = on_waiting
        self._queue = Queue(limits)
        self._expiry = Expiry(self._queue.expire)
        self._words = ThreadPoolExecutor(1, "care-words")
        self._fresh = ThreadPoolExecutor(1, "care-fresh")
        self._asks: dict[int, tuple[int, list[Pending]]] = {}
        self._numbers = count(1)
        self._bulk_under_way = 0
        self._pumping = False
        self._closing = False

    def __len__(self) -> int:
        """Jobs that wait, those in the engine not counted."""
        return len(self._queue)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        self._link = Link(self._path, self._take_in, self._lose)
        self._link.start()

    async def prepare(self, serving: Serving) -> None:
        await self._link.open(serving)

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
        if self._closing:
            raise ShuttingDown("the service is shutting down; ask another instance")
        if self._link.handle_of(serving) is None:
            raise EngineAway(AWAY)
        futures = [self._loop.create_future() for _ in jobs]
        self._queue.enter(serving, jobs, futures, timeout_seconds=timeout_seconds, bulk=bulk, probe=probe)
        if timeout_seconds is not None:
            self._expiry.watch()
        self._pump_soon()
        return futures

    def require_room(self, serving: Serving, jobs: Sequence[Job], *, bulk: bool | None = None) -> None:
        """See Dispatcher."""
        self._queue.require_room(serving, jobs, bulk=bulk)

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Accepts nothing more, answers what was accepted; after the timeout the rest is refused."""
        self._closing = True
        self._drained.clear()
        if self._queue.in_flight:
            try:
                await asyncio.wait_for(self._drained.wait(), timeout_seconds)
            except TimeoutError:
                logger.warning("%d queries were not answered in time", self._queue.in_flight)
        self._lose(ShuttingDown("the service shut down before this query was answered"))
        self._expiry.cancel()
        await self._link.close()
        for threads in (self._words, self._fresh):
            threads.shutdown(wait=False, cancel_futures=True)

    def _pump_soon(self) -> None:
        # Not at once: what else arrives in this turn of the loop goes into the same frame.
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Sends what may go: every online job, and a slice of the bulk jobs where none is under way."""
        self._pumping = False
        while batch := self._queue.take(bulk=not self._bulk_under_way):
            trip, serving = Trip(), batch[0].serving
            self._bulk_under_way += sum(entry.bulk for entry in batch)
            pending = [Pending.begin(entry, trip) for entry in batch]
            self._ask(serving, [one for one in pending if one.dense is None])
            if words := [one for one in pending if one.lexical is None]:
                searching = self._loop.run_in_executor(self._words, _search_words, [one.entry for one in words])
                searching.add_done_callback(partial(self._words_found, words))
        self._on_waiting(len(self._queue))

    def _ask(self, serving: Serving, pending: Iterable[Pending]) -> None:
        """Sends jobs to the engine, like ones in one frame."""
        handle = self._link.handle_of(serving)
        alike: defaultdict[Likeness, list[Pending]] = defaultdict(list)
        for one in pending:
            alike[one.likeness()].append(one)
        for likeness, together in alike.items():
            if handle is None:
                self._fail(together, EngineAway(AWAY))
                continue
            number = next(self._numbers)
            try:
                self._link.send(write_ask(number, handle, likeness, together))
            except Exception:
                logger.exception("%d queries could not be sent to the engine", len(together))
                self._fail(together, EngineFailed(FAILED))
            else:
                self._asks[number] = likeness.k, together

    def _take_in(self, answer: Answer) -> None:
        """Takes the engine's answer to one ask."""
        k, asked = self._asks.pop(answer.number, (0, []))
        if answer.batch:
            self._queue.cost.observe(answer.batch, answer.times.encode_seconds + answer.times.search_seconds)
            self._queue.others_wait(max(0, answer.waiting - self._queue.in_flight))
        if answer.status is Status.DONE:
            self._dense_found(asked, answer, k)
        elif answer.status is Status.EXPIRED:
            self._fail(asked, DeadlineExceeded("the time for this request is over; allow it more"))
        elif answer.status is Status.DATABASE_AWAY:
            self._fail(asked, DatabaseAway(DATABASE_AWAY))
        else:
            self._fail(asked, EngineFailed(FAILED))

    def _dense_found(self, asked: Sequence[Pending], answer: Answer, k: int) -> None:
        overlay = asked[0].entry.serving.fresh if asked else None
        if overlay is None or not answer.vectors.size:
            self._take_dense(asked, answer, k, None)
            return
        # Not here: at the limit of fresh passages a batch of queries takes tens of milliseconds.
        scoring = self._loop.run_in_executor(self._fresh, overlay.score_vectors, answer.vectors)
        scoring.add_done_callback(partial(self._fresh_scored, asked, answer, k))

    def _fresh_scored(self, asked: Sequence[Pending], answer: Answer, k: int, scoring: asyncio.Future[Scores]) -> None:
        if scoring.cancelled():
            return
        if (error := scoring.exception()) is not None:
            logger.error("fresh passages could not be scored", exc_info=error)
            self._fail(asked, EngineFailed(FAILED))
            return
        self._take_dense(asked, answer, k, scoring.result())

    def _take_dense(self, asked: Sequence[Pending], answer: Answer, k: int, fresh: Scores | None) -> None:
        further = []
        for position, one in enumerate(asked):
            if one.take_dense(answer, position, k, None if fresh is None else fresh[position]):
                self._settle(one)
            else:
                further.append(one)
        if further:
            self._ask(further[0].entry.serving, further)

    def _words_found(self, pending: Sequence[Pending], searching: asyncio.Future[tuple[list[Side], float]]) -> None:
        if searching.cancelled():
            return
        if (error := searching.exception()) is not None:
            logger.error("a search for words failed", exc_info=error)
            self._fail(pending, EngineFailed(FAILED))
            return
        sides, seconds = searching.result()
        for one, side in zip(pending, sides, strict=True):
            one.lexical, one.trip.words_seconds = side, seconds
            self._settle(one)

    def _settle(self, one: Pending) -> None:
        """Answers a job of which everything is there."""
        if not one.is_complete:
            return
        try:
            outcome = one.outcome()
        except Exception:
            logger.exception("a ranking failed")
            self._fail([one], EngineFailed(FAILED))
        else:
            self._leave(one.entry)
            one.entry.answer(outcome)

    def _fail(self, pending: Iterable[Pending], error: Exception) -> None:
        for one in pending:
            self._leave(one.entry)
            one.entry.fail(error)

    def _leave(self, entry: Entry) -> None:
        if self._queue.leave([entry]) and entry.bulk:
            self._bulk_under_way -= 1
            if not self._bulk_under_way:
                self._pump_soon()
        if not self._queue.in_flight:
            self._drained.set()

    def _lose(self, error: Exception | None = None) -> None:
        """Nothing that is in flight will be answered."""
        self._asks.clear()
        self._bulk_under_way = 0
        for entry in self._queue.clear():
            entry.fail(error or EngineAway(AWAY))
        self._drained.set()


def _search_words(entries: Sequence[Entry]) -> tuple[list[Side], float]:
    """The lexical side of each, and the seconds that all took together."""
    began = perf_counter()
    sides = [search_lexical(entry.serving, entry.job) for entry in entries if isinstance(entry.job, SearchJob)]
    return sides, perf_counter() - began
