"""The systems that an evaluation compares: dense, BM25, hybrid, and a pair with some fresh documents.

A system answers a task: rankings by row for retrieval and reranking, cosines for sentence pairs. The fusion, the
lexical index and the correction are the ones that serve.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from models import lexical
from models.correction import SAMPLE, Correction, names_of, sample_rows
from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens
from models.errors import CareError
from models.evaluation.cache import Vectors, load_rankings, save_rankings, text_hash
from models.evaluation.encoders import Reranker
from models.evaluation.readers import PairReader, Reader
from models.evaluation.results import SystemFacts
from models.evaluation.sets import PairSet, RerankSet, RetrievalSet, Task
from models.fusion import CANDIDATES, Fusion, fuse, reorder
from models.lexical import LexicalIndex, Ranking

DEPTH = CANDIDATES
"""How many documents a ranking holds; Recall@100 looks at all of them."""
# Scores of a block of queries with the whole corpus are held at once: 40 MB for 40,000 documents.
QUERIES_AT_ONCE = 256
TENTH = 10

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
        """Returns a function that answers one query from scratch, as a service would; for timing."""
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
        self._documents = _Last(lambda task, data: self.reader.read(data.documents, Side.DOCUMENT, task))
        self._answers = _Last(self._answer)

    @property
    def facts(self) -> SystemFacts:
        return self.reader.facts

    def answer(self, task: Task) -> Answers:
        return self._answers(task, task)

    def embeddings(self, task: Task, data: RetrievalSet) -> tuple[Vectors, Vectors]:
        """Returns unit vectors of the queries and of the documents of a retrieval task, in the set's order."""
        return self.reader.read(data.queries, Side.QUERY, task), self._documents(data.documents, task, data)

    def positive_cosines(self, task: Task, data: RetrievalSet) -> list[float]:
        """Returns each query's mean cosine with the documents that answer it."""
        queries, documents = self.embeddings(task, data)
        return [float((documents[rows] @ query).mean()) for query, rows in zip(queries, data.answers(), strict=True)]

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        documents, read = self._documents(data.documents, task, data), partial(self.reader.read, cached=False)
        return lambda query: top((read([query], Side.QUERY, task) @ documents.T)[0], DEPTH)

    def _answer(self, task: Task) -> Answers:
        if isinstance(task.data, RetrievalSet):
            return search(*self.embeddings(task, task.data), DEPTH)
        first, second = (self.reader.read(texts, side, task) for side, texts in task.texts())
        if isinstance(task.data, PairSet):
            cosines: NDArray[np.float32] = (first * second).sum(axis=1)
            return cosines
        ends = np.cumsum([len(of_query) for of_query in task.data.candidates])[:-1]
        lists = zip(first, np.split(second, ends), strict=True)
        return [top(of_query @ query, len(of_query)) for query, of_query in lists]


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
        return replace(dense, name=f"hybrid {dense.name}{how}", kind="hybrid")

    def answer(self, task: Task) -> list[Ranking]:
        lexical = self._lexical.answer(task)
        dense = self._dense.answer(task)
        assert isinstance(dense, list)  # BM25 refuses every task whose answers are not rankings
        return [self._fuse(*pair) for pair in zip(dense, lexical, strict=True)]

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        dense, lexical = self._dense.online(task, data), self._lexical.online(task, data)
        return lambda query: self._fuse(dense(query), lexical(query))

    def _fuse(self, dense: Ranking, lexical: Ranking) -> Ranking:
        return fuse(dense, lexical, self._fusion, self._weight, self._dense.reader.trust)


class Reranked:
    """Another system whose first documents a cross-encoder puts into order, as the service's second stage does."""

    def __init__(self, first: System, reranker: Reranker, name: str, depth: int) -> None:
        self._first, self._reranker, self._name, self._depth = first, reranker, name, depth

    @property
    def facts(self) -> SystemFacts:
        first = self._first.facts
        return replace(first, name=f"{first.name}, {self._name} {self._depth}")

    def answer(self, task: Task) -> Answers:
        rankings = self._first.answer(task)
        if not isinstance(task.data, RetrievalSet) or not isinstance(rankings, list):
            raise NotApplicable("only the hits of a search are reranked")
        return rerank(task.data, rankings, self._reranker, self._depth)

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        first = self._first.online(task, data)

        def answer(query: str) -> Ranking:
            asked = replace(data, queries=[query])
            return rerank(asked, [first(query)], self._reranker, self._depth)[0]

        return answer


def rerank(data: RetrievalSet, rankings: Sequence[Ranking], reranker: Reranker, depth: int) -> list[Ranking]:
    """Returns each ranking with its first `depth` documents ordered by the reranker.

    Scores are the reranker's, and below them the places of the other documents: they follow in their old order.
    """
    tokenizer = reranker.tokenizer
    wanted = np.unique(np.concatenate([rows[:depth] for rows, _ in rankings])).tolist()
    documents = dict(zip(wanted, tokenizer.documents([data.documents[row] for row in wanted]), strict=True))
    pairs: list[Tokens] = []
    for query, (rows, _) in zip(data.queries, rankings, strict=True):
        asked = tokenizer.query(query)
        pairs += [tokenizer.join(asked, documents[row]) for row in rows[:depth].tolist()]
    ends = np.cumsum([len(rows[:depth]) for rows, _ in rankings])[:-1]
    found = []
    for (rows, _), scores in zip(rankings, np.split(reranker.score(pairs), ends), strict=True):
        order = reorder(scores)
        rest = scores.min(initial=0.0) - np.arange(1, len(rows) - len(scores) + 1, dtype=np.float32)
        found.append((np.concatenate([rows[:depth][order], rows[depth:]]), np.concatenate([scores[order], rest])))
    return found


class WithFresh:
    """Exact search by a pair, some documents being fresh: read by its query encoder, as the service reads them.

    `choose` gives the rows of the fresh documents for each query. Their vectors are corrected as the service does.
    """

    def __init__(
        self, indexed: Dense, pair: PairReader, name: str, choose: Callable[[RetrievalSet], Sequence[Sequence[int]]]
    ) -> None:
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
        fresh = self._read(distinct, task, data)
        if self._pair.document.encoder.fingerprint not in names_of(self._pair.query.encoder):
            rows = sample_rows(len(documents), SAMPLE)  # as a build learns it from the passages of its corpus
            fresh = Correction.fit(self._read(rows, task, data), documents[rows])(fresh)
        for query, of_query in zip(queries, chosen, strict=True):
            scores = documents @ query
            scores[of_query] = (fresh @ query)[np.searchsorted(distinct, of_query)]
            yield top(scores, DEPTH)

    def _read(self, rows: NDArray[np.int64], task: Task, data: RetrievalSet) -> Vectors:
        reader = self._pair.query
        return reader.read([data.documents[row] for row in rows.tolist()], reader.encoder.spec.document_side, task)


def a_tenth(data: RetrievalSet) -> list[list[int]]:
    """Returns the same documents for all queries: a tenth of them, by a hash of their ids."""
    order = sorted(range(len(data.document_ids)), key=lambda row: blake2b(data.document_ids[row].encode()).digest())
    return [order[: -(-len(order) // TENTH)]] * len(data.query_ids)


def fresh_systems(dense: Dense) -> Iterator[System]:
    """Yields a pair with each query's answers fresh, and with a tenth of all; none for a single encoder."""
    if isinstance(dense.reader, PairReader):
        yield WithFresh(dense, dense.reader, "answers fresh", RetrievalSet.answers)
        yield WithFresh(dense, dense.reader, "a tenth fresh", a_tenth)


def _rank_candidates(data: RerankSet) -> list[Ranking]:
    """Ranks the candidates that share a term with their query; terms are weighed by all lists together."""
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


def score_rows(queries: Vectors, documents: Vectors) -> Iterator[Vectors]:
    """Yields each query's score with every document, computed for a block of queries at a time."""
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        yield from queries[start : start + QUERIES_AT_ONCE] @ documents.T


def search(queries: Vectors, documents: Vectors, depth: int) -> list[Ranking]:
    """Returns the best documents of each query, by exact search."""
    return [top(scores, depth) for scores in score_rows(queries, documents)]


def top(scores: NDArray[np.float32], k: int) -> Ranking:
    """Returns the k best rows of a score vector, ties by row."""
    k = min(k, len(scores))
    # The k-th best score, and then every row that reaches it: a partition alone would choose among ties at random.
    bar = np.partition(scores, len(scores) - k)[len(scores) - k]
    rows = np.flatnonzero(scores >= bar)
    order = np.lexsort((rows, -scores[rows]))[:k]
    return rows[order].astype(np.int64), scores[rows[order]]
