"""The systems that an evaluation compares: an encoder, BM25, and the two together as the service fuses them.

A system answers a task: rankings by row for retrieval and reranking, cosines for sentence pairs. The fusion and the
lexical index are the ones that serve. Knows nothing of metrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from models import lexical
from models.errors import CareError
from models.evaluation.cache import Vectors, load_rankings, save_rankings, text_hash
from models.evaluation.readers import Reader
from models.evaluation.results import SystemFacts
from models.evaluation.sets import PairSet, RerankSet, RetrievalSet, Task
from models.fusion import CANDIDATES, Fusion, fuse
from models.lexical import LexicalIndex, Ranking
from models.spec import Side

DEPTH = CANDIDATES
"""How many documents a ranking holds; Recall@100 looks at all of them."""
# Scores of a block of queries with the whole corpus are held at once: 40 MB for 40,000 documents.
QUERIES_AT_ONCE = 256

Answers = list[Ranking] | NDArray[np.float32]
"""A ranking for each query, of corpus rows or of places among its candidates; or a cosine for each pair."""
Made = TypeVar("Made")


class NotApplicable(CareError):
    """A kind of task that a system cannot answer by its nature; the message says why."""


class System(Protocol):
    """Anything that can be judged."""

    @property
    def facts(self) -> SystemFacts: ...

    def answer(self, task: Task) -> Answers:
        """Answers the whole task, from the cache where it can; raises NotApplicable."""
        ...

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        """A function that answers one query from scratch, as a service would; for timing."""
        ...


class _Last(Generic[Made]):
    """Calls a function and keeps its last result: sets share a corpus, and a hybrid shares its parts' answers."""

    def __init__(self, make: Callable[..., Made]) -> None:
        self._make = make
        self._last: tuple[object, Made] | None = None

    def __call__(self, key: object, *arguments: object) -> Made:
        if self._last is None or self._last[0] is not key:
            self._last = (key, self._make(*arguments))
        return self._last[1]


class Dense:
    """Exact search by the cosine of embeddings."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self._documents = _Last(self._read_documents)
        self._answers = _Last(self._answer)

    @property
    def facts(self) -> SystemFacts:
        return self.reader.facts

    def answer(self, task: Task) -> Answers:
        return self._answers(task, task)

    def embeddings(self, task: Task, data: RetrievalSet) -> tuple[Vectors, Vectors]:
        """Unit vectors of the queries and of the documents of a retrieval task, in the set's order."""
        return self.reader.read(data.queries, Side.QUERY, task), self._documents(data.documents, task, data)

    def positive_cosines(self, task: Task, data: RetrievalSet) -> list[float]:
        """Each query's mean cosine with the documents that answer it."""
        queries, documents = self.embeddings(task, data)
        return [float((documents[rows] @ query).mean()) for query, rows in zip(queries, data.answers(), strict=True)]

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        documents, reader = self._documents(data.documents, task, data), self.reader.uncached()
        return lambda query: top((reader.read([query], Side.QUERY, task) @ documents.T)[0], DEPTH)

    def _read_documents(self, task: Task, data: RetrievalSet) -> Vectors:
        return self.reader.read(data.documents, Side.DOCUMENT, task)

    def _answer(self, task: Task) -> Answers:
        match task.data:
            case RetrievalSet() as data:
                queries, documents = self.embeddings(task, data)
                blocks = range(0, len(queries), QUERIES_AT_ONCE)
                return [
                    top(scores, DEPTH)
                    for start in blocks
                    for scores in queries[start : start + QUERIES_AT_ONCE] @ documents.T
                ]
            case RerankSet() as data:
                (_, queries), (_, candidates) = ((side, self.reader.read(t, side, task)) for side, t in task.texts())
                ends = np.cumsum([len(of_query) for of_query in data.candidates])[:-1]
                lists = zip(queries, np.split(candidates, ends), strict=True)
                return [top(of_query @ query, len(of_query)) for query, of_query in lists]
            case PairSet():
                first, second = (self.reader.read(texts, side, task) for side, texts in task.texts())
                cosines: NDArray[np.float32] = (first * second).sum(axis=1)
                return cosines


class Lexical:
    """BM25; its rankings are kept in a folder."""

    facts = SystemFacts("BM25", "lexical")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = _Last(LexicalIndex.build)
        self._rankings = _Last(self._rank)

    def answer(self, task: Task) -> list[Ranking]:
        match task.data:
            case RetrievalSet() as data:
                return self._rankings(task, data)
            case RerankSet() as data:
                return _rank_candidates(data)
            case PairSet():
                raise NotApplicable("BM25 finds documents and has no similarity of two sentences")

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        index = self._index(data.documents, data.documents)
        return lambda query: index.search(query, DEPTH)

    def _rank(self, data: RetrievalSet) -> list[Ranking]:
        # Whatever changes the analysis of texts changes the name, so that no old ranking is taken for a new one.
        analysis = f"{inspect.getsource(lexical)} {version('tantivy')} {DEPTH}"
        texts = text_hash(*data.documents), text_hash(*data.queries)
        path = self._folder / f"{text_hash(analysis, *(text.hex() for text in texts)).hex()}.npz"
        rankings = load_rankings(path)
        if rankings is None:
            index = self._index(data.documents, data.documents)
            rankings = [index.search(query, DEPTH) for query in data.queries]
            save_rankings(path, rankings)
        return rankings


class Hybrid:
    """Both, fused as the service does; the dense side's share is chosen by query where `weight` is None."""

    def __init__(self, dense: Dense, lexical: Lexical, fusion: Fusion, weight: float | None) -> None:
        self._dense, self._lexical, self._fusion, self._weight = dense, lexical, fusion, weight

    @property
    def facts(self) -> SystemFacts:
        dense = self._dense.facts
        how = " reciprocal" if self._fusion is Fusion.RECIPROCAL else "" if self._weight is None else f" {self._weight}"
        return SystemFacts(f"hybrid {dense.name}{how}", "hybrid", dense.fingerprint, dense.dim, dense.parameters)

    def answer(self, task: Task) -> list[Ranking]:
        lexical = self._lexical.answer(task)
        dense = self._dense.answer(task)
        assert isinstance(dense, list)  # BM25 refuses every task whose answers are not rankings
        return [self._fuse(*pair) for pair in zip(dense, lexical, strict=True)]

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        dense, lexical = self._dense.online(task, data), self._lexical.online(task, data)
        return lambda query: self._fuse(dense(query), lexical(query))

    def _fuse(self, dense: Ranking, lexical: Ranking) -> Ranking:
        return fuse(dense, lexical, self._fusion, self._weight)


def _rank_candidates(data: RerankSet) -> list[Ranking]:
    """The places of the candidates that share a term with their query; terms are weighed by all lists together."""
    index = LexicalIndex.build(text for of_query in data.candidates for text, _ in of_query)
    rankings = []
    start = 0
    for query, of_query in zip(data.queries, data.candidates, strict=True):
        allowed = np.zeros(len(index), dtype=np.bool_)
        allowed[start : start + len(of_query)] = True
        rows, scores = index.search(query, len(of_query), allowed)
        rankings.append((rows - start, scores))
        start += len(of_query)
    return rankings


def top(scores: NDArray[np.float32], k: int) -> Ranking:
    """The k best rows of a score vector, ties by row."""
    k = min(k, len(scores))
    # The k-th best score, and then every row that reaches it: a partition alone would choose among ties at random.
    bar = np.partition(scores, len(scores) - k)[len(scores) - k]
    rows = np.flatnonzero(scores >= bar)
    order = np.lexsort((rows, -scores[rows]))[:k]
    return rows[order].astype(np.int64), scores[rows[order]]
