"""An engine that a test can hold still, look into and break."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from models.tokenizer import Tokens
from service.engine.protocol import BatchTimes, Found, Job, Mode, Options
from service.serving import Serving

WAIT_SECONDS = 10.0
DENSE = Options(Mode.DENSE, 10)


def serving(name: str = "one") -> Serving:
    """The batcher only asks a serving who it is."""
    return Serving(*[cast(Any, name)] * 4)


def job(query: str, tokens: int = 1) -> Job:
    return Job(query, DENSE, Tokens(list(range(tokens)), truncated=False))


def jobs(*queries: str) -> list[Job]:
    return [job(query) for query in queries]


def score_of(query: str) -> float:
    """A different number for each query of a test."""
    return float(int.from_bytes(query.encode()[-2:], "big"))


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

    def run(self, serving: Serving, batch: Sequence[Job]) -> tuple[list[Found], BatchTimes]:
        self.batches.append((serving, [job.query for job in batch]))
        self.lengths.append(max(len(job.tokens or ()) for job in batch))
        self.entered.release()
        assert self._open.wait(WAIT_SECONDS)
        if self.poison & {job.query for job in batch}:
            raise RuntimeError("the device fell over")
        found = [
            Found(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([score_of(job.query)], np.float32))
            for job in batch
        ]
        return found[: -1 if self.short else None], BatchTimes(0.001, 0.002)
