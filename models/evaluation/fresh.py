"""What a document loses until the next re-index: read by a pair's query encoder, as the service reads fresh documents.

Two systems for a pair. One reads everything so, a collection of fresh documents only. The other reads so the documents
that answer the query at hand, and leaves all others to the document encoder: a fresh document among indexed ones. Knows
nothing of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from models.evaluation.cache import Vectors
from models.evaluation.readers import PairReader
from models.evaluation.results import SystemFacts
from models.evaluation.sets import RetrievalSet, Task
from models.evaluation.systems import DEPTH, Answers, Dense, NotApplicable, System, top
from models.lexical import Ranking
from models.spec import Side


@dataclass(frozen=True, slots=True)
class StandIn:
    """A reader: the query encoder of a pair in its document encoder's place."""

    pair: PairReader

    @property
    def facts(self) -> SystemFacts:
        facts = self.pair.facts
        return replace(facts, name=f"{facts.name}, all fresh")

    def read(self, texts: Sequence[str], side: Side, task: Task) -> Vectors:
        own = self.pair.query.encoder.spec.document_side if side is Side.DOCUMENT else side
        return self.pair.query.read(texts, own, task)

    def uncached(self) -> StandIn:
        return StandIn(self.pair.uncached())


class FreshAnswers:
    """Exact search by a pair, the answers to each query being fresh."""

    def __init__(self, indexed: Dense, pair: PairReader) -> None:
        self._indexed = indexed
        self._fresh = StandIn(pair)

    @property
    def facts(self) -> SystemFacts:
        facts = self._indexed.facts
        return replace(facts, name=f"{facts.name}, answers fresh")

    def answer(self, task: Task) -> Answers:
        if not isinstance(task.data, RetrievalSet):
            raise NotApplicable("only a corpus that is searched has fresh documents")
        return list(self._rank(task, task.data))

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        return self._indexed.online(task, data)

    def _rank(self, task: Task, data: RetrievalSet) -> Iterator[Ranking]:
        rows = {document: row for row, document in enumerate(data.document_ids)}
        answers = [[rows[each] for each, grade in data.qrels[query].items() if grade > 0] for query in data.query_ids]
        distinct = sorted({row for some in answers for row in some})
        place = {row: position for position, row in enumerate(distinct)}
        fresh = self._fresh.read([data.documents[row] for row in distinct], Side.DOCUMENT, task)
        queries, documents = self._indexed.embeddings(task, data)
        for query, some in zip(queries, answers, strict=True):
            scores = documents @ query
            scores[some] = fresh[[place[row] for row in some]] @ query
            yield top(scores, DEPTH)


def fresh_systems(dense: Dense) -> Iterator[System]:
    """Both systems of a pair; none of a single encoder, which reads every document itself."""
    if isinstance(dense.reader, PairReader):
        yield FreshAnswers(dense, dense.reader)
        yield Dense(StandIn(dense.reader))
