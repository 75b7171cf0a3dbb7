"""A job on its way through the engine process: what it asks for, and what of its answer is there already.

Knows nothing of sockets or of other jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.encoder.tokenizer import flatten
from models.fusion import LATER_DENSE
from service.engine.frames import Answer, Ask, write_filters
from service.engine.protocol import BatchTimes, Mode, Outcome, SearchJob, Vector
from service.engine.queue import Entry
from service.engine.ranking import (
    NOTHING,
    Scores,
    Side,
    documents_wanted,
    first_k,
    is_short,
    join_fresh,
    rank,
    take_main,
    widen,
)


@dataclass(slots=True)
class Trip:
    """What jobs that left together spent; they share one BatchTimes, made when the first of them is back."""

    encode_seconds: float = 0.0
    dense_seconds: float = 0.0
    words_seconds: float = 0.0
    _times: BatchTimes | None = None

    @property
    def times(self) -> BatchTimes:
        if self._times is None:
            self._times = BatchTimes(self.encode_seconds, max(self.dense_seconds, self.words_seconds))
        return self._times


@dataclass(frozen=True, slots=True)
class Likeness:
    """What queries must have in common to share an ask."""

    k: int
    bulk: bool
    ready: bool
    keep_vectors: bool
    filters: bytes


@dataclass(slots=True, eq=False)
class Pending:
    """One job under way; a side that is not there yet is None."""

    entry: Entry
    trip: Trip
    k: int
    dense: Side | None
    lexical: Side | None
    vector: Vector | None = None

    @classmethod
    def begin(cls, entry: Entry, trip: Trip) -> Pending:
        job = entry.job
        if not isinstance(job, SearchJob):
            return cls(entry, trip, 0, None, NOTHING)
        k = first_k(entry.serving, documents_wanted(job.options))
        dense = None if job.needs_vector else NOTHING
        return cls(entry, trip, k, dense, NOTHING if job.options.mode is Mode.DENSE else None)

    @property
    def is_complete(self) -> bool:
        return self.dense is not None and self.lexical is not None

    def likeness(self) -> Likeness:
        job = self.entry.job
        if not isinstance(job, SearchJob):
            return Likeness(0, self.entry.bulk, ready=False, keep_vectors=True, filters=b"")
        ready = job.vector is not None
        keep = job.keep_vector or self.entry.serving.fresh is not None
        filters = write_filters(self.entry.serving.snapshot_filters(job.options.filters))
        return Likeness(self.k, self.entry.bulk, ready, keep, filters)

    def take_dense(self, answer: Answer, position: int, k: int, fresh: Scores | None) -> bool:
        """Takes this job's part of an answer to a search for `k` passages; False where it must look further.

        `fresh` are the scores of the fresh passages, where there are any.
        """
        self.trip.encode_seconds, self.trip.dense_seconds = answer.times.encode_seconds, answer.times.search_seconds
        if answer.vectors.size:
            self.vector = answer.vectors[position].copy()
        job, serving = self.entry.job, self.entry.serving
        if not isinstance(job, SearchJob):
            self.dense = NOTHING
            return True
        wanted = documents_wanted(job.options)
        side = NOTHING
        if k:
            present = answer.rows[position] >= 0
            rows = answer.rows[position][present]
            side = take_main(serving, rows, answer.scores[position][present], wanted, LATER_DENSE)
            if is_short(serving, side, wanted, len(rows), k):
                self.k = widen(serving, k)
                return False
        self.dense = side if fresh is None else join_fresh(serving, job.options, side, fresh, LATER_DENSE)
        return True

    def outcome(self) -> Outcome:
        """The whole answer, once it is complete."""
        job = self.entry.job
        found = NOTHING.best
        if isinstance(job, SearchJob):
            found = rank(job.options, self.dense or NOTHING, self.lexical or NOTHING)
        return Outcome(found, self.trip.times, self.vector)


def write_ask(number: int, handle: int, likeness: Likeness, together: Sequence[Pending]) -> Ask:
    """The ask for jobs that are alike; raises ValueError where one has neither tokens nor a vector."""
    deadline = max(deadline for one in together for _, deadline in one.entry.waiters)
    jobs = [one.entry.job for one in together]
    own = (number, handle, likeness.k, likeness.bulk, likeness.keep_vectors, deadline, likeness.filters)
    if likeness.ready:
        ready = [np.frombuffer(job.vector or b"", np.float32) for job in jobs if isinstance(job, SearchJob)]
        return Ask(*own, vectors=np.stack(ready))
    tokens = [job.tokens for job in jobs if job.tokens is not None]
    if len(tokens) != len(jobs):
        raise ValueError("a job came with neither tokens nor a vector")
    return Ask(*own, *flatten(tokens))
