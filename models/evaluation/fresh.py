"""What a document gains or loses until the next re-index: read by a pair's query encoder, as the service reads it.

Two systems for a pair, both a search of indexed documents with some fresh ones among them: the answers to the query at
hand, or a tenth of all, whoever asks. The fresh ones are corrected as the service corrects them. Knows nothing of
metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from models.correction import SAMPLE, Correction, names_of
from models.evaluation.cache import Vectors
from models.evaluation.readers import PairReader
from models.evaluation.results import SystemFacts
from models.evaluation.sets import RetrievalSet, Task
from models.evaluation.systems import DEPTH, Answers, Dense, NotApplicable, System, top
from models.lexical import Ranking
from models.sampling import sample_rows

TENTH = 10

Choose = Callable[[RetrievalSet], Sequence[Sequence[int]]]
"""The rows of the documents that are fresh, for each query."""


class WithFresh:
    """Exact search by a pair, some documents being fresh."""

    def __init__(self, indexed: Dense, pair: PairReader, name: str, choose: Choose) -> None:
        self._indexed, self._pair, self._name, self._choose = indexed, pair, name, choose

    @property
    def facts(self) -> SystemFacts:
        facts = self._indexed.facts
        return replace(facts, name=f"{facts.name}, {self._name}")

    def answer(self, task: Task) -> Answers:
        if not isinstance(task.data, RetrievalSet):
            raise NotApplicable("only a corpus that is searched has fresh documents")
        return list(self._rank(task, task.data))

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        return self._indexed.online(task, data)

    def _rank(self, task: Task, data: RetrievalSet) -> Iterator[Ranking]:
        chosen = self._choose(data)
        distinct = np.unique(np.concatenate([np.empty(0, np.int64), *chosen]).astype(np.int64))
        queries, documents = self._indexed.embeddings(task, data)
        fresh = self._correction(task, data, documents)(self._read(distinct.tolist(), task, data))
        for query, rows in zip(queries, chosen, strict=True):
            scores = documents @ query
            scores[rows] = (fresh @ query)[np.searchsorted(distinct, rows)]
            yield top(scores, DEPTH)

    def _read(self, rows: Sequence[int], task: Task, data: RetrievalSet) -> Vectors:
        reader = self._pair.query
        return reader.read([data.documents[row] for row in rows], reader.encoder.spec.document_side, task)

    def _correction(self, task: Task, data: RetrievalSet, documents: Vectors) -> Callable[[Vectors], Vectors]:
        """As a build learns it from the passages of its corpus."""
        if self._pair.document.encoder.fingerprint in names_of(self._pair.query.encoder):
            return lambda vectors: vectors
        rows = sample_rows(len(documents), SAMPLE)
        return Correction.fit(self._read(rows.tolist(), task, data), documents[rows])


def a_tenth(data: RetrievalSet) -> list[list[int]]:
    """The same documents for all queries: a tenth of them, by a hash of their ids."""
    order = sorted(range(len(data.document_ids)), key=lambda row: blake2b(data.document_ids[row].encode()).digest())
    return [order[: -(-len(order) // TENTH)]] * len(data.query_ids)


def fresh_systems(dense: Dense) -> Iterator[System]:
    """Both systems of a pair; none of a single encoder, which reads every document itself."""
    if isinstance(dense.reader, PairReader):
        yield WithFresh(dense, dense.reader, "answers fresh", RetrievalSet.answers)
        yield WithFresh(dense, dense.reader, "a tenth fresh", a_tenth)
