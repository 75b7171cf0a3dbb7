"""In-process engine: a thread takes batches from the queue, encodes, searches and ranks them.

The thread wakes when a query arrives and takes what waits by then, without timers: a lone query starts at once, and
under load batches form by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import cast
from weakref import WeakKeyDictionary

from indexer.errors import BadCollection, DatabaseAway
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import OnnxEncoder, OnnxReranker
from models.errors import CareError
from service.engine.device import CpuEncoder, GraphReranker, OpenServing, OpenVectors, VectorSearch, compute_batch
from service.engine.jobs import ENGINE_FAILED, BatchTimes, Job, Outcome, SearchJob
from service.engine.queue import Dispatcher, Entry, Limits, OnBatch
from service.engine.ranking import PendingJob, group_jobs, make_request, search_lexical
from service.errors import EngineFailed
from service.serving.serving import Serving

logger = logging.getLogger(__name__)


class Batcher(Dispatcher):
    """Runs an engine in a thread of its own."""

    def __init__(
        self, engine: InProcessEngine, limits: Limits, on_batch: OnBatch = lambda size, tokens, seconds, waiting: None
    ) -> None:
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
            tokens = sum(entry.length for entry in batch if entry.job.vector is None)
            self._on_batch(len(batch), tokens, seconds, len(self._queue))
        except DatabaseAway as error:
            self._post(self._fail, batch, error)
        except BaseException as error:
            # A panic of a Rust library (tokenizers, tantivy) is no Exception; it must not end the thread either.
            logger.error(
                "a batch of %d queries failed: %s", len(batch), error, exc_info=not isinstance(error, CareError)
            )
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
            self._queue.cost.observe(sum(entry.size for entry in batch), seconds)
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
        """Answers every job of the batch, in its order; called in the batcher's thread, one batch at a time."""
        began = perf_counter()
        times = BatchTimes()
        pending = [PendingJob.begin(Entry(serving, job, bulk=False, share=1.0), times) for job in batch]
        while missing := [one for one in pending if one.dense is None]:
            times.encode_seconds += self._search_dense(serving, missing)
        for one in pending:
            if one.lexical is None and isinstance(one.entry.job, SearchJob):
                one.lexical = search_lexical(serving, one.entry.job)
        times.search_seconds = perf_counter() - began - times.encode_seconds
        return [one.outcome() for one in pending]

    def _search_dense(self, serving: Serving, pending: Sequence[PendingJob]) -> float:
        """Searches by vectors once; returns the seconds of encoding."""
        vectors = self._opened.get(serving.snapshot)
        if vectors is None:
            vectors = self._opened[serving.snapshot] = self._open_vectors(serving.snapshot)
        # A process with this engine loads the weights.
        encoder = CpuEncoder(cast(OnnxEncoder, serving.encoder))
        reranker = GraphReranker(cast(OnnxReranker, serving.reranker)) if serving.reranker is not None else None
        held = OpenServing(serving, encoder, vectors, reranker=reranker)
        groups = group_jobs(pending)
        # Vectors are kept, so that a job that must search deeper is not encoded again.
        requests = [make_request(key._replace(keep_vectors=True), jobs) for key, jobs in groups.items()]
        responses = compute_batch(held, requests)
        for jobs, response in zip(groups.values(), responses, strict=True):
            fresh = serving.fresh.score_vectors(response.vectors) if serving.fresh is not None and jobs[0].k else None
            for position, one in enumerate(jobs):
                one.take_dense(response, position, None if fresh is None else fresh[position])
        return responses[0].times.encode_seconds
