"""From jobs to rankings, in both engines: jobs become requests, a device computes them, responses are ranked.

A request is a few arrays, so that any number of queries costs a few array operations, and crosses a socket as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from indexer.store.arrays import Rows, Scores
from models.encoder.tokenizer import FlatIds, flatten
from models.fusion import LATER_DENSE, Mode
from service.engine import ranking
from service.engine.jobs import (
    NO_ROWS,
    NO_VECTORS,
    BatchTimes,
    Outcome,
    PairJob,
    Request,
    Response,
    SearchJob,
    Status,
    Vectors,
)  # fmt: skip
from service.engine.queue import Entry
from service.engine.ranking import NOTHING, Side
from service.serving.serving import Serving

if TYPE_CHECKING:
    from indexer.store.filters import Filter
    from service.engine.device import Encoder, GraphReranker, VectorSearch


@dataclass(slots=True, eq=False)
class OpenServing:
    """A serving on a device. In the engine process it has a handle; `holders` counts the openings by workers."""

    serving: Serving
    encoder: Encoder
    vectors: VectorSearch
    handle: int = 0
    holders: int = 0
    reranker: GraphReranker | None = None


def compute_batch(held: OpenServing, requests: Sequence[Request], waiting: int = 0) -> list[Response]:
    """Answers each request, in order; raises what the device or a filter raises."""
    began = perf_counter()
    vectors = _embed(held, requests)
    encoded = perf_counter()
    found = _search(held, requests, vectors)
    times = BatchTimes(encoded - began, perf_counter() - encoded)
    size = sum(request.load for request in requests)
    return [
        Response(one.number, Status.DONE, times, size, waiting, rows, scores, own if one.keep_vectors else NO_VECTORS)
        for one, own, (scores, rows) in zip(requests, vectors, found, strict=True)
    ]


def _embed(held: OpenServing, requests: Sequence[Request]) -> list[Vectors]:
    """Returns the embeddings (queries, dim) of each request: its own, or encoded in one call with the others'.

    Those of pairs are their scores (pairs, 1).
    """
    vectors = [request.vectors for request in requests]
    ways: list[tuple[bool, Callable[[FlatIds, FlatIds], Vectors]]]
    ways = [(False, held.encoder.encode), (True, partial(_score, held))]
    for pairs, compute in ways:
        unread = [place for place, one in enumerate(requests) if len(one.lengths) and one.pairs is pairs]
        if not unread:
            continue
        lengths = np.concatenate([requests[place].lengths for place in unread])
        matrix, start = compute(np.concatenate([requests[place].ids for place in unread]), lengths), 0
        for place in unread:
            end = start + len(requests[place].lengths)
            vectors[place] = matrix[start:end]
            start = end
    return vectors


def _score(held: OpenServing, ids: FlatIds, lengths: FlatIds) -> Vectors:
    if held.reranker is None:
        raise ValueError("a pair came to an engine without a reranker")
    return held.reranker.score(ids, lengths)[:, None]


def _search(held: OpenServing, requests: Sequence[Request], vectors: Sequence[Vectors]) -> list[tuple[Vectors, Rows]]:
    """Returns scores and rows of each request; searches those of equal filters in one call, with the largest k."""
    groups: defaultdict[tuple[Filter, ...], list[int]] = defaultdict(list)
    for position, request in enumerate(requests):
        if request.k:
            groups[request.filters].append(position)
    found: list[tuple[Vectors, Rows]] = [(NO_VECTORS, NO_ROWS)] * len(requests)
    for filters, positions in groups.items():
        selection = held.serving.select(filters) if filters else None
        k = max(requests[position].k for position in positions)
        own = [vectors[position] for position in positions]
        scores, rows = held.vectors.search(own[0] if len(own) == 1 else np.concatenate(own), k, selection)
        start = 0
        for position in positions:
            end, depth = start + requests[position].size, requests[position].k
            found[position] = scores[start:end, :depth], rows[start:end, :depth]
            start = end
    return found


class RequestKey(NamedTuple):
    """What jobs must have in common to share a request."""

    k: int
    bulk: bool
    ready: bool
    keep_vectors: bool
    pairs: bool
    filters: tuple[Filter, ...]


@dataclass(slots=True, eq=False)
class PendingJob:
    """A job under way; a side that is not there yet is None."""

    entry: Entry
    times: BatchTimes
    k: int = 0
    dense: Side | None = None
    lexical: Side | None = NOTHING
    vector: Vectors | None = None

    @classmethod
    def begin(cls, entry: Entry, times: BatchTimes) -> PendingJob:
        job = entry.job
        if not isinstance(job, SearchJob):
            return cls(entry, times)
        k = ranking.first_k(entry.serving, ranking.documents_wanted(job.options))
        dense = None if job.needs_vector else NOTHING
        lexical = NOTHING if job.options.mode is Mode.DENSE else None
        vector = None if job.vector is None else np.frombuffer(job.vector, np.float32)
        return cls(entry, times, k, dense, lexical, vector)

    @property
    def key(self) -> RequestKey:
        job, serving, ready = self.entry.job, self.entry.serving, self.vector is not None
        filters = serving.overlay.snapshot_filters(job.options.filters) if isinstance(job, SearchJob) else ()
        keep, pairs = job.keep_vector or serving.fresh is not None, isinstance(job, PairJob)
        return RequestKey(self.k, self.entry.bulk, ready, keep, pairs, filters)

    def take_dense(self, response: Response, position: int, fresh: Scores | None) -> None:
        """Takes this job's part of a response; `dense` stays None if the job needs a request with a larger `k`.

        `fresh` are the scores of the fresh passages, if there are any.
        """
        if response.vectors.size:
            self.vector = response.vectors[position]
        job, serving = self.entry.job, self.entry.serving
        if not isinstance(job, SearchJob):
            self.dense = NOTHING
            return
        rows, scores = response.rows[position], response.scores[position]
        side = ranking.rank_passages(serving, job.options, rows, scores, self.k, LATER_DENSE)
        if side is None:
            self.k = ranking.widen(serving, self.k)
        else:
            self.dense = side if fresh is None else ranking.join_fresh(serving, job.options, side, fresh, LATER_DENSE)

    def outcome(self) -> Outcome:
        """Ranks the job once both sides are there."""
        job, found = self.entry.job, NOTHING.best
        if isinstance(job, SearchJob):
            found = ranking.rank(job.options, self.dense or NOTHING, self.lexical or NOTHING)
        # A copy: the vector is part of a batch's or a frame's memory.
        kept = self.vector.copy() if job.keep_vector and self.vector is not None else None
        return Outcome(found, self.times, kept)


def group_jobs(pending: Iterable[PendingJob]) -> dict[RequestKey, list[PendingJob]]:
    """Groups jobs that can share a request."""
    groups: defaultdict[RequestKey, list[PendingJob]] = defaultdict(list)
    for one in pending:
        groups[one.key].append(one)
    return groups


def make_request(key: RequestKey, together: Sequence[PendingJob], number: int = 0, handle: int = 0) -> Request:
    """Makes the request for jobs of one key; raises ValueError if one has neither tokens nor a vector."""
    deadline = max((deadline for one in together for _, deadline in one.entry.waiters), default=float("inf"))
    request = Request(number, handle, key.k, key.bulk, key.keep_vectors, deadline, key.filters, pairs=key.pairs)
    if key.ready:
        request.vectors = np.stack([one.vector for one in together if one.vector is not None])
        return request
    tokens = [one.entry.job.tokens for one in together if one.entry.job.tokens is not None]
    if len(tokens) != len(together):
        raise ValueError("a job came with neither tokens nor a vector")
    request.ids, request.lengths = flatten(tokens)
    return request
