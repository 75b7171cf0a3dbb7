"""A fake engine that a test can block, inspect and break, and a fake clock."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from models.encoder.tokenizer import Tokens
from models.fusion import Mode
from service.engine.jobs import BatchTimes, EncodeJob, Found, Job, Options, Outcome, SearchJob
from service.serving.serving import Serving

WAIT_SECONDS = 60.0
DENSE = Options(Mode.DENSE, 10)


def serving(name: str = "one") -> Serving:
    """Makes a serving of which the batcher reads only the identity."""
    return Serving(*[cast(Any, name)] * 5)


def job(query: str, tokens: int = 1) -> SearchJob:
    return SearchJob(query, DENSE, Tokens(list(range(tokens)), truncated=False))


def jobs(*queries: str) -> list[SearchJob]:
    return [job(query) for query in queries]


def score_of(query: str) -> float:
    """Returns a different number for each query of a test."""
    return float(int.from_bytes(query.encode()[-2:], "big"))


class Clock:
    """A clock that moves only when a test sets `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeEngine:
    """Answers each query with its own score; `hold` keeps batches in the engine until `release`."""

    def __init__(self) -> None:
        self.batches: list[tuple[Serving, list[str]]] = []
        self.lengths: list[int] = []
        self.poison: set[str] = set()
        self.short = False
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()

    @property
    def queries(self) -> list[list[str]]:
        return [queries for _, queries in self.batches]

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def wait_until_entered(self) -> None:
        assert self.entered.acquire(timeout=WAIT_SECONDS)

    def run(self, serving: Serving, batch: Sequence[Job]) -> list[Outcome]:
        queries = [job.query for job in batch if isinstance(job, SearchJob)]
        self.batches.append((serving, queries))
        self.lengths.append(max(len(job.tokens or ()) for job in batch))
        self.entered.release()
        assert self._open.wait(WAIT_SECONDS)
        if self.poison & set(queries):
            raise RuntimeError("the device fell over")
        times = BatchTimes(0.001, 0.002)
        outcomes = [_answer(job, times) for job in batch]
        return outcomes[: -1 if self.short else None]


def _answer(job: Job, times: BatchTimes) -> Outcome:
    nothing = np.zeros(1, np.int64)
    if isinstance(job, EncodeJob):
        return Outcome(Found(nothing[:0], nothing[:0], np.empty(0, np.float32)), times, np.ones(2, np.float32))
    return Outcome(Found(nothing, nothing, np.array([score_of(job.query)], np.float32)), times)
