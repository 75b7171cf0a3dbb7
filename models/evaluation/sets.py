"""Evaluation sets as values, and the task that asks one of them of a system. Nothing is read here (see `reading`).

Knows nothing of encoders or metrics beyond their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from models.spec import Side


class Kind(StrEnum):
    """What a set asks of a system."""

    RETRIEVAL = "retrieval"
    LINKING = "linking"
    RERANK = "rerank"
    STS = "sts"


METRICS: dict[Kind, tuple[str, ...]] = {
    Kind.RETRIEVAL: (
        "nDCG@10",
        "nDCG@20",
        "Recall@5",
        "Recall@20",
        "Recall@100",
        "MRR@10",
        "Acc@1",
        "Acc@5",
        "Acc@10",
    ),
    Kind.LINKING: ("MRR@5", "Recall@1", "Recall@5"),
    Kind.RERANK: ("MAP@10", "MAP", "nDCG", "MRR@10"),
    Kind.STS: ("Pearson", "Spearman"),
}
"""What is measured for each kind; the first is the figure that the papers print."""

Qrels = dict[str, dict[str, int]]
"""Grades of relevance by query id and document id; 1 and more are relevant."""


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, the corpus they are asked of, and which documents answer them. Sets of one corpus share its lists."""

    name: str
    document_ids: list[str]
    documents: list[str]
    query_ids: list[str]
    queries: list[str]
    qrels: Qrels

    def answers(self) -> list[list[int]]:
        """The rows of the documents that answer each query."""
        rows = {document: row for row, document in enumerate(self.document_ids)}
        return [[rows[each] for each, grade in self.qrels[query].items() if grade > 0] for query in self.query_ids]


@dataclass(frozen=True)
class RerankSet:
    """Lists of candidates (text, grade); from the grade `relevant` on, a candidate is relevant."""

    name: str
    queries: list[str]
    candidates: list[list[tuple[str, int]]]
    relevant: int = 1


@dataclass(frozen=True)
class PairSet:
    """Sentence pairs with the similarity that people gave them."""

    name: str
    pairs: list[tuple[str, str]]
    scores: list[float]


@dataclass(frozen=True)
class Task:
    """One set as one benchmark asks it: the unit that `judge` hands to every system.

    The set is a RetrievalSet for the kinds retrieval and linking, a RerankSet for rerank, a PairSet for sts. An
    instruction of None leaves the encoder its own; a text, even an empty one, replaces it. A query instruction is the
    task's wording, which the encoder's own template joins with the query. `main_metric` is the
    figure that the benchmark prints, one of METRICS[kind]. `hyde_prompt` asks a language model for a document that
    would answer {query}; without one, the prompt is ours (`hyde`).
    """

    benchmark: str
    data: RetrievalSet | RerankSet | PairSet
    kind: Kind
    main_metric: str
    query_instruction: str | None = None
    document_instruction: str | None = None
    hyde_prompt: str | None = None

    @property
    def name(self) -> str:
        return self.data.name

    def instruction(self, side: Side) -> str | None:
        return self.query_instruction if side is Side.QUERY else self.document_instruction

    def texts(self) -> list[tuple[Side, list[str]]]:
        """Everything that an encoder reads for this task; both sentences of a pair count as queries."""
        match self.data:
            case RetrievalSet():
                return [(Side.QUERY, self.data.queries), (Side.DOCUMENT, self.data.documents)]
            case RerankSet():
                candidates = [text for of_query in self.data.candidates for text, _ in of_query]
                return [(Side.QUERY, self.data.queries), (Side.DOCUMENT, candidates)]
            case PairSet():
                return [(Side.QUERY, [pair[place] for pair in self.data.pairs]) for place in (0, 1)]


def plain_task(benchmark: str, data: RetrievalSet | RerankSet | PairSet, kind: Kind) -> Task:
    """A task by the kind's own main metric and without instructions."""
    return Task(benchmark, data, kind, METRICS[kind][0])
