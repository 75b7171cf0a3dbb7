"""Turns jobs into requests and a device's responses into rankings, for both engines.

A request is a few arrays, so that any number of queries costs a few array operations, and crosses a socket as it is. A
document scores as its best passage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from indexer.store.arrays import Rows, Scores
from indexer.store.overlay import SOME_WORD
from models.encoder.tokenizer import flatten
from models.fusion import CANDIDATES, LATER_DENSE, LATER_LEXICAL, Mode, best_passages, fuse
from models.lexical import Ranking
from service.engine.jobs import (
    BatchTimes,
    Evidence,
    Found,
    Options,
    Outcome,
    PairJob,
    Request,
    Response,
    SearchJob,
    Vectors,
)
from service.engine.queue import Entry

if TYPE_CHECKING:
    from indexer.store.filters import Filter
    from service.serving.serving import Serving

# Factor of the next search's depth if the passages found belong to too few documents.
WIDEN = 4
# Passages beyond those that hold the wanted documents: first passages that may rank before a later one.
SPARE_PASSAGES = 20


class Side(NamedTuple):
    """The best documents of the dense or the lexical search, and the passages that they were chosen from."""

    best: Found
    passages: Ranking


_NO_ROWS, _NO_SCORES = np.empty(0, np.int64), np.empty(0, np.float32)
NOTHING = Side(Found(_NO_ROWS, _NO_ROWS, _NO_SCORES), (_NO_ROWS, _NO_SCORES))


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
        k = first_k(entry.serving, documents_wanted(job.options))
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
        side = rank_passages(serving, job.options, rows, scores, self.k, LATER_DENSE)
        if side is None:
            self.k = widen(serving, self.k)
        else:
            self.dense = side if fresh is None else join_fresh(serving, job.options, side, fresh, LATER_DENSE)

    def outcome(self) -> Outcome:
        """Ranks the job once both sides are there."""
        job, found = self.entry.job, NOTHING.best
        if isinstance(job, SearchJob):
            found = rank(job.options, self.dense or NOTHING, self.lexical or NOTHING)
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


def rank(options: Options, dense: Side, lexical: Side) -> Found:
    """Ranks at most top_k documents of one job; a side that the mode does not use is NOTHING."""
    if options.mode is Mode.HYBRID:
        found = _fuse(options, dense.best, lexical.best)
    else:
        found = dense.best if options.mode is Mode.DENSE else lexical.best
    return replace(found, evidence=Evidence(dense.passages, lexical.passages)) if options.evidence else found


def search_lexical(serving: Serving, job: SearchJob) -> Side:
    """Searches by words."""
    options = job.options
    allowed = serving.allowed(options.filters) if options.filters else None
    k = first_k(serving, documents_wanted(options))
    found = None
    while found is None:
        rows, scores = serving.snapshot.lexical.search(job.query, k, allowed)
        found = rank_passages(serving, options, rows, scores, k, LATER_LEXICAL)
        k = widen(serving, k)
    if serving.fresh is None:
        return found
    words = serving.fresh.score_words(job.query)
    return join_fresh(serving, options, found, words, LATER_LEXICAL, SOME_WORD)


def documents_wanted(options: Options) -> int:
    """Returns how many documents one side must find: fusion looks deeper than the answer."""
    return max(CANDIDATES, options.top_k) if options.mode is Mode.HYBRID else options.top_k


def first_k(serving: Serving, documents: int) -> int:
    """Passages to search for first: enough for this many documents if passages are spread evenly."""
    passages = len(serving.snapshot.passages)
    per_document = -(-passages // len(serving.snapshot.documents))
    return min(passages, documents * per_document + (SPARE_PASSAGES if per_document > 1 else 0))


def widen(serving: Serving, k: int) -> int:
    """Passages to search for after `k` held too few documents."""
    return min(len(serving.snapshot.passages), k * WIDEN)


def rank_passages(serving: Serving, options: Options, rows: Rows, scores: Scores, k: int, later: float) -> Side | None:
    """Groups what a search of the snapshot for `k` passages found; None if a deeper search may find more documents.

    Rows of −1 are empty places. Passages that were replaced or deleted since the build are left out.
    """
    present = rows >= 0
    rows, scores = rows[present], scores[present]
    is_full = len(rows) == k < len(serving.snapshot.passages)
    if serving.fresh is not None:
        rows, scores = serving.fresh.visible(rows, scores)
    wanted = documents_wanted(options)
    side = group(serving, rows, scores, wanted, later)
    return None if is_full and len(side.best.documents) < wanted else side


def join_fresh(
    serving: Serving, options: Options, main: Side, scores: Scores, later: float, least: float = -np.inf
) -> Side:
    """Adds the fresh passages with these `scores` to a side; those below `least` were not found."""
    wanted = documents_wanted(options)
    # If the snapshot gave as many documents as wanted, no score below the last one can be among the best.
    bar = float(main.best.scores[-1]) if len(main.best.documents) >= wanted else least
    rows, own = serving.overlay.pick(scores, options.filters, max(bar, least))
    if not len(rows):
        return main
    rows, own = np.concatenate([main.passages[0], rows]), np.concatenate([main.passages[1], own])
    order = np.lexsort((rows, -own))
    return group(serving, rows[order], own[order], wanted, later)


def group(serving: Serving, passages: Rows, scores: Scores, limit: int, later: float) -> Side:
    """Keeps the best passage of each document, best first; one that is not the first counts `later` of its score."""
    documents, rows, best = best_passages(passages, scores, serving.overlay.documents_of, later)
    return Side(Found(documents[:limit], rows[:limit], best[:limit]), (passages, scores))


def _fuse(options: Options, dense: Found, lexical: Found) -> Found:
    documents, scores = fuse(
        (dense.documents, dense.scores),
        (lexical.documents, lexical.scores),
        options.fusion,
        options.weight,
        options.trust,
    )
    # By words a document is found as a whole, so the passage is that of the embeddings if they found it.
    passages = dict(zip(lexical.documents.tolist(), lexical.passages.tolist(), strict=True))
    passages.update(zip(dense.documents.tolist(), dense.passages.tolist(), strict=True))
    best = documents[: options.top_k]
    rows = np.array([passages[row] for row in best.tolist()], dtype=np.int64)
    return Found(best, rows, scores[: options.top_k])
