"""The items of one request through the engine: a bounded number at a time, answered in the order asked.

However many items a request has, only a window of them waits in the queue or in memory, and whoever takes the results
slowly slows the rest down. Knows nothing of what the items are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import TypeVar

from service.engine.jobs import BatchTimes, Job, Outcome
from service.engine.queue import Dispatcher
from service.errors import DeadlineExceeded, Overloaded
from service.serving import Serving

# Items that are prepared and handed in together, at most, and items that may be under way.
PORTION = 32
WINDOW = 128

Item = TypeVar("Item")
Note = TypeVar("Note")
Result = TypeVar("Result")
Prepared = tuple[Job | None, Note]
"""The job of an item, None where its result needs no engine, and what is to be remembered until it is done."""
Waiting = tuple[Note, asyncio.Future[Outcome] | None]
Prepare = Callable[[Sequence[Item]], Awaitable[Sequence[Prepared[Note]]]]
Finish = Callable[[Note, Outcome | None], Result]


class Deadline:
    """How long the engine may take: until the request's own limit, or, without one, so long for each portion."""

    def __init__(self, timeout_ms: int | None, default_ms: int) -> None:
        self._end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        self._default_seconds = default_ms / 1000

    def seconds_left(self) -> float:
        """Raises DeadlineExceeded where nothing is left."""
        if self._end is None:
            return self._default_seconds
        left = self._end - perf_counter()
        if left <= 0:
            raise DeadlineExceeded("the time for this request is over; allow it more")
        return left


class Line:
    """Runs the items of one request and adds up how long it waited for the engine, and for which batches."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        serving: Serving,
        deadline: Deadline,
        *,
        portion: int = PORTION,
        bulk: bool = False,
        probe: bool = False,
    ) -> None:
        """`portion`: no more items at once than the queue can ever take."""
        self.waited_seconds = 0.0
        self.batches: list[BatchTimes] = []
        self._dispatcher = dispatcher
        self._serving = serving
        self.deadline = deadline
        self._portion = min(portion, PORTION)
        self._bulk = bulk
        self._probe = probe
        self._begun = False

    def require_room(self, jobs: Sequence[Job]) -> None:
        """Raises Overloaded if the first portion would be refused; later portions wait for room instead."""
        if not (self._begun or self._probe):
            self._dispatcher.require_room(self._serving, jobs, bulk=self._bulk)

    async def run(
        self, items: Sequence[Item], prepare: Prepare[Item, Note], finish: Finish[Note, Result]
    ) -> list[Result]:
        """One result per item, in order, all at once."""
        if len(items) > self._portion:
            async with aclosing(self.stream(items, prepare, finish)) as results:
                return [result async for result in results]
        waiting = self._submit(await prepare(items)) or []
        try:
            return [await self._finish(note, future, finish) for note, future in waiting]
        except BaseException:
            _abandon(waiting)
            raise

    async def stream(
        self, items: Sequence[Item], prepare: Prepare[Item, Note], finish: Finish[Note, Result]
    ) -> AsyncGenerator[Result, None]:
        """One result per item, in order, each as soon as it is there. To be closed by whoever stops early."""
        waiting: deque[Waiting[Note]] = deque()
        try:
            for start in range(0, len(items), self._portion):
                prepared = await prepare(items[start : start + self._portion])
                while len(waiting) + len(prepared) > WINDOW:
                    yield await self._finish(*waiting.popleft(), finish)
                while (begun := self._submit(prepared, patient=bool(waiting))) is None:
                    yield await self._finish(*waiting.popleft(), finish)
                waiting.extend(begun)
                if all(future is None for _, future in begun):
                    await asyncio.sleep(0)  # items that need no engine never wait, and others want the event loop, too
            while waiting:
                yield await self._finish(*waiting.popleft(), finish)
        finally:
            _abandon(waiting)

    def _submit(self, prepared: Sequence[Prepared[Note]], *, patient: bool = False) -> list[Waiting[Note]] | None:
        """Hands in a portion. Where there is no room: None for who can wait until earlier items are done."""
        jobs = [job for job, _ in prepared if job is not None]
        futures: list[asyncio.Future[Outcome]] = []
        self._begun = True
        if jobs:
            timeout_seconds = self.deadline.seconds_left()
            try:
                futures = self._dispatcher.submit(
                    self._serving, jobs, timeout_seconds=timeout_seconds, bulk=self._bulk, probe=self._probe
                )
            except Overloaded:
                if patient:
                    return None
                raise
        answers = iter(futures)
        return [(note, None if job is None else next(answers)) for job, note in prepared]

    async def _finish(self, note: Note, future: asyncio.Future[Outcome] | None, finish: Finish[Note, Result]) -> Result:
        if future is None:
            return finish(note, None)
        began = perf_counter()
        if future.done():
            await asyncio.sleep(0)  # results that are there already must not keep the event loop from other requests
        outcome = await future
        self.waited_seconds += perf_counter() - began
        if not self.batches or self.batches[-1] is not outcome.times:
            self.batches.append(outcome.times)
        return finish(note, outcome)


def _abandon(waiting: Iterable[Waiting[Note]]) -> None:
    for _, future in waiting:
        if future is not None:
            future.cancel()
