"""The engine inside the service's own process: encode, search and rank one batch with plain blocking numpy code.

Knows nothing of HTTP, queues or texts of documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from models.fusion import LATER_DENSE
from models.onnx_encoder import OnnxEncoder
from models.tokenizer import flatten
from service.engine.device import CpuEncoder, OpenVectors, Vectors, VectorSearch
from service.engine.protocol import BatchTimes, Job, Outcome, SearchJob
from service.engine.ranking import (
    NOTHING,
    Side,
    documents_wanted,
    first_k,
    is_short,
    join_fresh,
    rank,
    search_lexical,
    take_main,
    widen,
)
from service.serving.serving import Serving


class InProcessEngine:
    """Runs batches on this machine's processor."""

    def __init__(self, open_vectors: OpenVectors) -> None:
        """`open_vectors` says who searches the vectors of a snapshot."""
        self._open_vectors = open_vectors

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
            Outcome(found.get(position, NOTHING.best), times, vectors.get(position) if job.wants_vector else None)
            for position, job in enumerate(batch)
        ]

    def _search_dense(
        self, serving: Serving, searches: dict[int, SearchJob], vectors: dict[int, Vectors]
    ) -> dict[int, Side]:
        """What the dense side found, by position in the batch; jobs of equal filters are searched in one call."""
        if self not in serving.opened:
            serving.opened[self] = self._open_vectors(serving.snapshot)
        index = serving.opened[self]
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
    """The embedding (dim,) of every job that is answered by one, by position in the batch."""
    vectors: dict[int, Vectors] = {}
    tokens = {}
    for position, job in enumerate(batch):
        if not job.needs_vector:
            continue
        if isinstance(job, SearchJob) and job.vector is not None:
            vectors[position] = np.frombuffer(job.vector, np.float32)
        elif job.tokens is not None:
            tokens[position] = job.tokens
        else:
            raise ValueError("a job came with neither tokens nor a vector")
    if tokens:
        encoder = serving.encoder
        assert isinstance(encoder, OnnxEncoder)  # who runs this engine loads the weights
        vectors.update(zip(tokens, CpuEncoder(encoder).encode(*flatten(list(tokens.values()))), strict=True))
    return vectors


def _search_group(serving: Serving, index: VectorSearch, queries: Vectors, jobs: Sequence[SearchJob]) -> list[Side]:
    """The best documents of each query, as many as its job wants; all jobs have the same filters."""
    wanted = [documents_wanted(job.options) for job in jobs]
    filters = serving.snapshot_filters(jobs[0].options.filters)
    selection = serving.select(filters) if filters else None
    found, passages = [NOTHING] * len(jobs), [0] * len(jobs)
    pending = list(range(len(jobs)))
    k = first_k(serving, max(wanted))
    while pending:
        scores, rows = index.search(queries[pending], k, selection)
        for query, own_scores, own_rows in zip(pending, scores, rows, strict=True):
            present = own_rows >= 0
            own = own_rows[present], own_scores[present]
            found[query] = take_main(serving, *own, wanted[query], LATER_DENSE)
            passages[query] = int(np.count_nonzero(present))
        pending = [query for query in pending if is_short(serving, found[query], wanted[query], passages[query], k)]
        k = widen(serving, k)
    if serving.fresh is None:
        return found
    fresh = serving.fresh.score_vectors(queries)
    return [
        join_fresh(serving, job.options, side, own, LATER_DENSE)
        for job, side, own in zip(jobs, found, fresh, strict=True)
    ]
