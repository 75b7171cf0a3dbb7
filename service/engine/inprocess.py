"""The engine inside the service's own process: encode, search and fuse one batch with plain blocking numpy code.

Rows of passages become rows of documents here: a document is as good as its best passage. Knows nothing of HTTP,
queues or texts of documents.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from indexer.store import IndexKind
from indexer.store.vectors import limit_threads
from models.fusion import CANDIDATES, fuse
from models.tokenizer import Tokens
from service.engine.protocol import BatchTimes, Found, Job, Mode
from service.serving import Mask, Serving

# How much further a search looks when the passages it found belong to too few documents.
WIDEN = 4
# A search of fewer products than this takes a core a few milliseconds. Sharing it would take longer: the threads meet
# at barriers, and on a busy machine one that is not running holds up the rest for a whole time slice.
PARALLEL_PRODUCTS = 50_000_000
# About how many rows a walk over the graph looks at.
GRAPH_ROWS = 2000

Rows = NDArray[np.int64]
Scores = NDArray[np.float32]


class InProcessEngine:
    """Runs batches on this machine's processor."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` of one search at most; 0 means one per core."""
        self._threads = threads or len(os.sched_getaffinity(0))

    def run(self, serving: Serving, batch: Sequence[Job]) -> tuple[list[Found], BatchTimes]:
        began = perf_counter()
        positions = [position for position, job in enumerate(batch) if job.options.mode is not Mode.LEXICAL]
        tokens = [_tokens_of(batch[position]) for position in positions]
        vectors = serving.encoder.encode_tokens(tokens) if tokens else _NO_VECTORS
        encoded = perf_counter()
        limit_threads(self._search_threads(serving, len(tokens)))
        dense = _search_dense(serving, batch, positions, vectors)
        found = [_rank(serving, job, dense.get(position, _NOTHING)) for position, job in enumerate(batch)]
        return found, BatchTimes(encoded - began, perf_counter() - encoded)

    def _search_threads(self, serving: Serving, queries: int) -> int:
        snapshot = serving.snapshot
        rows = len(snapshot.passages)
        read = min(rows, GRAPH_ROWS) if snapshot.vectors.kind is IndexKind.HNSW else rows
        return self._threads if queries * read * snapshot.manifest.dim >= PARALLEL_PRODUCTS else 1


def _tokens_of(job: Job) -> Tokens:
    if job.tokens is None:
        raise ValueError(f"a job of mode {job.options.mode} came without tokens")
    return job.tokens


def _rank(serving: Serving, job: Job, dense: Found) -> Found:
    """The final ranking of one job, of at most top_k documents."""
    mode, top_k = job.options.mode, job.options.top_k
    if mode is Mode.DENSE:
        return dense
    lexical = _search_lexical(serving, job)
    if mode is Mode.LEXICAL:
        return lexical
    documents, scores = fuse(
        (dense.documents, dense.scores), (lexical.documents, lexical.scores), job.options.fusion, job.options.weight
    )
    # Where both sides found the document, the words' passage is shown: it has something to mark.
    passages = dict(zip(dense.documents.tolist(), dense.passages.tolist(), strict=True))
    passages.update(zip(lexical.documents.tolist(), lexical.passages.tolist(), strict=True))
    best = documents[:top_k]
    return Found(best, np.array([passages[row] for row in best.tolist()], dtype=np.int64), scores[:top_k])


def _search_dense(
    serving: Serving, batch: Sequence[Job], positions: Sequence[int], vectors: Scores
) -> dict[int, Found]:
    """Rankings by position in the batch; jobs of equal filters are searched in one call."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for row, position in enumerate(positions):
        groups[batch[position].options.filters].append(row)
    found: dict[int, Found] = {}
    for rows in groups.values():
        jobs = [batch[positions[row]] for row in rows]
        rankings = _search_group(serving, vectors[rows], [_wanted(job) for job in jobs], _allowed(serving, jobs[0]))
        found.update(zip((positions[row] for row in rows), rankings, strict=True))
    return found


def _search_group(serving: Serving, vectors: Scores, wanted: Sequence[int], allowed: Mask | None) -> list[Found]:
    """The best documents of each vector, `wanted` many where there are as many."""
    total = len(serving.snapshot.passages)
    found: list[Found] = [_NOTHING] * len(wanted)
    pending = list(range(len(wanted)))
    k = _first_k(serving, max(wanted))
    while pending:
        scores, rows = serving.snapshot.vectors.search(vectors[pending], k, allowed)
        for place, query in enumerate(pending):
            present = rows[place] >= 0
            found[query] = _group(serving, rows[place][present], scores[place][present], wanted[query])
        short = (rows[:, -1] >= 0) & (k < total)
        pending = [
            query for place, query in enumerate(pending) if short[place] and len(found[query].documents) < wanted[query]
        ]
        k = min(total, k * WIDEN)
    return found


def _search_lexical(serving: Serving, job: Job) -> Found:
    total = len(serving.snapshot.passages)
    wanted, allowed = _wanted(job), _allowed(serving, job)
    k = _first_k(serving, wanted)
    while True:
        rows, scores = serving.snapshot.lexical.search(job.query, k, allowed)
        found = _group(serving, rows, scores, wanted)
        if len(found.documents) == wanted or len(rows) < k or k >= total:
            return found
        k = min(total, k * WIDEN)


def _wanted(job: Job) -> int:
    """Documents that one side must find: fusion looks deeper than the answer."""
    return max(CANDIDATES, job.options.top_k) if job.options.mode is Mode.HYBRID else job.options.top_k


def _allowed(serving: Serving, job: Job) -> Mask | None:
    return serving.allowed(job.options.filters) if job.options.filters else None


def _first_k(serving: Serving, documents: int) -> int:
    """Passages that hold so many documents if they were spread evenly."""
    passages = len(serving.snapshot.passages)
    per_document = -(-passages // len(serving.snapshot.documents))
    return min(passages, documents * per_document)


def _group(serving: Serving, passages: Rows, scores: Scores, limit: int) -> Found:
    """The first passage of each document, best first: the input is sorted, so it is the document's best."""
    documents = serving.snapshot.passages.documents[passages].astype(np.int64)
    _, first = np.unique(documents, return_index=True)
    first.sort()
    first = first[:limit]
    return Found(documents[first], passages[first], scores[first])


_NO_VECTORS = np.empty((0, 0), np.float32)
_NOTHING = Found(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
