"""Submits the texts of a request to the engine: cuts and tokenises them, sends them in portions, keeps their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from models.encoder.spec import Side
from models.encoder.tokenizer import TextReader, Tokens
from service.engine.jobs import BatchTimes, Job, Outcome
from service.errors import DeadlineExceeded, Overloaded

if TYPE_CHECKING:
    from service.engine.queue import Dispatcher
    from service.serving.serving import Serving

PORTION = 32  # texts that are prepared and submitted together, at most
WINDOW = 128  # texts of a request under way, at most
# Longer texts are cut before they are tokenised: no language has this many characters to a token on average.
CHARACTERS_PER_TOKEN = 8
LOOP_CHARACTERS = 1000  # that the event loop tokenises itself, because a thread would take longer to wake

Note = TypeVar("Note")
Prepared = tuple[Job | None, Note]
"""The job of a text, None if its result needs no engine, and what the caller wants back with the outcome."""
Prepare = Callable[[Sequence[str]], Awaitable[Sequence[Prepared[Note]]]]
Waiting = deque[tuple[Note, asyncio.Future[Outcome] | None]]


@dataclass(frozen=True, slots=True)
class ReadText:
    """A text as far as the encoder reads it; without tokens for the lexical index, and for a server that encodes."""

    text: str
    tokens: Tokens | None
    truncated: bool


def cut(text: str, encoder: TextReader) -> ReadText:
    """Cuts a text to what the encoder could read at most."""
    short = text[: encoder.spec.max_length * CHARACTERS_PER_TOKEN]
    return ReadText(short, None, len(short) < len(text))


async def tokenise(texts: Sequence[str], encoder: TextReader, side: Side) -> list[ReadText]:
    """Cuts and tokenises texts, in order."""
    short = [cut(text, encoder) for text in texts]
    words = [text.text for text in short]
    if sum(map(len, words)) <= LOOP_CHARACTERS:
        tokens = encoder.tokenize(words, side)
    else:
        tokens = await asyncio.to_thread(encoder.tokenize, words, side)
    here = encoder.spec.address is None
    return [
        ReadText(a.text, b if here else None, a.truncated or b.truncated) for a, b in zip(short, tokens, strict=True)
    ]


class Deadline:
    """How long the engine may take: until the request's own limit, or, without one, a fixed time for each portion."""

    def __init__(self, timeout_ms: int | None, default_ms: int) -> None:
        self._end = None if timeout_ms is None else perf_counter() + timeout_ms / 1000
        self._default_seconds = default_ms / 1000

    def seconds_left(self, ahead: int = 0) -> float:
        """Of a portion that waits for `ahead` others of its request; raises DeadlineExceeded if nothing is left."""
        if self._end is None:
            return self._default_seconds * (1 + ahead)
        left = self._end - perf_counter()
        if left <= 0:
            raise DeadlineExceeded("the time for this request is over; allow it more")
        return left


@dataclass(slots=True)
class Portions:
    """Submits the texts of one request, a window of them at a time: a slow reader of the results slows the rest.

    `size` is at most what the queue can ever take. Adds up how long the request waited for which batches.
    """

    dispatcher: Dispatcher
    serving: Serving
    deadline: Deadline
    size: int = PORTION
    bulk: bool = False
    probe: bool = False
    waited_seconds: float = 0.0
    batches: list[BatchTimes] = field(default_factory=list)
    _begun: bool = False

    def require_room(self, jobs: Sequence[Job]) -> None:
        """Raises Overloaded if the first portion would be refused; later portions wait for room instead."""
        if not (self._begun or self.probe):
            self.dispatcher.require_room(self.serving, jobs, bulk=self.bulk)

    async def single(
        self, texts: Sequence[str], prepare: Prepare[Note], finish: Callable[[Note, Outcome | None], Awaitable[bytes]]
    ) -> list[bytes]:
        """Finishes the texts of one portion as they come; without `outcomes`, which adds 8 µs to a cached answer."""
        waiting = self._submit(await prepare(texts)) or deque()
        try:
            return [await finish(*await self._next(waiting)) for _ in texts]
        finally:
            _cancel(waiting)

    async def outcomes(
        self, texts: Sequence[str], prepare: Prepare[Note]
    ) -> AsyncGenerator[tuple[Note, Outcome | None], None]:
        """Yields the note and the outcome of each text, in order, each as soon as it is there. Must be closed."""
        waiting: Waiting[Note] = deque()
        try:
            for start in range(0, len(texts), self.size):
                prepared = await prepare(texts[start : start + self.size])
                while len(waiting) + len(prepared) > WINDOW:
                    yield await self._next(waiting)
                while (submitted := self._submit(prepared, len(waiting))) is None:
                    yield await self._next(waiting)
                waiting.extend(submitted)
                if all(future is None for _, future in submitted):
                    await asyncio.sleep(0)  # cached results never wait; other requests need the event loop
            while waiting:
                yield await self._next(waiting)
        finally:
            _cancel(waiting)

    def _submit(self, prepared: Sequence[Prepared[Note]], ahead: int = 0) -> Waiting[Note] | None:
        """Submits the jobs of a portion; None if there is no room and `ahead` earlier ones are still under way."""
        self._begun = True
        jobs = [job for job, _ in prepared if job is not None]
        if not jobs:
            return deque((note, None) for _, note in prepared)
        seconds = self.deadline.seconds_left(-(-ahead // self.size))
        try:
            futures = iter(
                self.dispatcher.submit(self.serving, jobs, timeout_seconds=seconds, bulk=self.bulk, probe=self.probe)
            )
        except Overloaded:
            if ahead:
                return None
            raise
        return deque((note, None if job is None else next(futures)) for job, note in prepared)

    async def _next(self, waiting: Waiting[Note]) -> tuple[Note, Outcome | None]:
        note, future = waiting[0]
        outcome = None
        if future is not None:
            began = perf_counter()
            if future.done():
                await asyncio.sleep(0)  # finished results must not keep the event loop from other requests
            outcome = await future
            self.waited_seconds += perf_counter() - began
            if not self.batches or self.batches[-1] is not outcome.times:
                self.batches.append(outcome.times)
        waiting.popleft()
        return note, outcome


def _cancel(waiting: Waiting[Note]) -> None:
    for _, future in waiting:
        if future is not None:
            future.cancel()
