"""The engine in this process: a thread that takes batches from the queue, encodes, searches and ranks them.

The thread wakes when a query arrives and takes what waits by then, without timers: a lone query starts at once, and
under load batches form by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from indexer.store import BadCollection, DatabaseAway, Snapshot
from models.fusion import LATER_DENSE
from models.onnx_encoder import OnnxEncoder
from models.tokenizer import flatten
from service.engine.device import CpuEncoder, OpenVectors, Vectors, VectorSearch
from service.engine.jobs import ENGINE_FAILED, BatchTimes, Job, Outcome, SearchJob
from service.engine.queue import Dispatcher, Entry, Limits, OnBatch
from service.engine.ranking import (
    NOTHING,
    Side,
    documents_wanted,
    first_k,
    join_fresh,
    rank,
    rank_passages,
    search_lexical,
    widen,
)
from service.errors import EngineFailed
from service.serving import Serving

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """Runs one batch at a time, in the batcher's thread."""

    def run(self, serving: Serving, batch: Sequence[Job]) -> list[Outcome]:
        """Answers every job of the batch, in its order, from the given serving."""
        ...


class Batcher(Dispatcher):
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Engine, limits: Limits, on_batch: OnBatch = lambda size, seconds, waiting: None) -> None:
        super().__init__(limits)
        self._engine = engine
        self._on_batch = on_batch
        self._thread = threading.Thread(target=self._work, name="care-engine", daemon=True)

    def start(self) -> None:
        super().start()
        self._thread.start()

    def _wake(self) -> None:
        self._changed.notify()

    async def _drain(self, timeout_seconds: float | None) -> None:
        if self._thread.is_alive():
            # The answers were posted to the loop before the thread ended, so they run before this await returns.
            await asyncio.to_thread(self._thread.join, timeout_seconds)

    def _work(self) -> None:
        """Runs one batch after another until the batcher closes and the queue is empty."""
        while self._run_batch():
            pass

    def _run_batch(self) -> bool:
        # A method of its own: while the thread waits it must hold no reference to the serving of its last batch.
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
        with contextlib.suppress(RuntimeError):  # the loop was closed without a shutdown
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
        # A client learns the reason only if the engine itself did not fail.
        failed = EngineFailed(ENGINE_FAILED)
        for entry in batch:
            entry.fail(cause if isinstance(cause, (BadCollection, DatabaseAway)) else failed, cause)


class InProcessEngine:
    """Encodes, searches and ranks a batch with blocking numpy code on the CPU."""

    def __init__(self, open_vectors: OpenVectors) -> None:
        self._open_vectors = open_vectors
        self._opened: WeakKeyDictionary[Snapshot, VectorSearch] = WeakKeyDictionary()

    def run(self, serving: Serving, batch: Sequence[Job]) -> list[Outcome]:
        began = perf_counter()
        vectors = _embed(serving, batch)
        encoded = perf_counter()
        searches = {position: job for position, job in enumerate(batch) if isinstance(job, SearchJob)}
        dense = self._search_dense(serving, searches, vectors)
        found = {
            position: rank(job.options, dense.get(position, NOTHING), search_lexical(serving, job))
            for position, job in searches.items()
        }
        times = BatchTimes(encoded - began, perf_counter() - encoded)
        return [
            Outcome(found.get(position, NOTHING.best), times, vectors.get(position) if job.keep_vector else None)
            for position, job in enumerate(batch)
        ]

    def _search_dense(
        self, serving: Serving, searches: dict[int, SearchJob], vectors: dict[int, Vectors]
    ) -> dict[int, Side]:
        """Searches by vectors, jobs of equal filters in one call; returns sides by position in the batch."""
        index = self._opened.get(serving.snapshot)
        if index is None:
            index = self._opened[serving.snapshot] = self._open_vectors(serving.snapshot)
        groups: defaultdict[object, dict[int, SearchJob]] = defaultdict(dict)
        for position, job in searches.items():
            if position in vectors:
                groups[job.options.filters][position] = job
        found: dict[int, Side] = {}
        for jobs in groups.values():
            queries = np.stack([vectors[position] for position in jobs])
            found.update(zip(jobs, _search_group(serving, index, queries, list(jobs.values())), strict=True))
        return found


def _embed(serving: Serving, batch: Sequence[Job]) -> dict[int, Vectors]:
    """Returns the embedding (dim,) of every job that needs one, by position in the batch."""
    vectors: dict[int, Vectors] = {}
    tokens = {}
    for position, job in enumerate(batch):
        if not job.needs_vector:
            continue
        if job.vector is not None:
            vectors[position] = np.frombuffer(job.vector, np.float32)
        elif job.tokens is not None:
            tokens[position] = job.tokens
        else:
            raise ValueError("a job came with neither tokens nor a vector")
    if tokens:
        encoder = serving.encoder
        assert isinstance(encoder, OnnxEncoder)  # a process with this engine loads the weights
        vectors.update(zip(tokens, CpuEncoder(encoder).encode(*flatten(list(tokens.values()))), strict=True))
    return vectors


def _search_group(serving: Serving, index: VectorSearch, queries: Vectors, jobs: Sequence[SearchJob]) -> list[Side]:
    """Finds the best documents of each query; all jobs have the same filters."""
    filters = serving.snapshot_filters(jobs[0].options.filters)
    selection = serving.select(filters) if filters else None
    found: dict[int, Side] = {}
    k = first_k(serving, max(documents_wanted(job.options) for job in jobs))
    while pending := [query for query in range(len(jobs)) if query not in found]:
        scores, rows = index.search(queries[pending], k, selection)
        for query, own_scores, own_rows in zip(pending, scores, rows, strict=True):
            side = rank_passages(serving, jobs[query].options, own_rows, own_scores, k, LATER_DENSE)
            if side is not None:
                found[query] = side
        k = widen(serving, k)
    sides = [found[query] for query in range(len(jobs))]
    if serving.fresh is None:
        return sides
    fresh = serving.fresh.score_vectors(queries)
    return [
        join_fresh(serving, job.options, side, own, LATER_DENSE)
        for job, side, own in zip(jobs, sides, fresh, strict=True)
    ]
