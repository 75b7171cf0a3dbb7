"""A running service as a system: its answers over HTTP, judged like any other ranking.

The service must hold the documents of the set, all of them and no others, under their ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from models.errors import CareError
from models.evaluation.results import SystemFacts
from models.evaluation.sets import PairSet, RerankSet, RetrievalSet, Task
from models.evaluation.systems import DEPTH, NotApplicable
from models.evaluation.web import Endpoint
from models.lexical import Ranking

# Queries of one request: more of them, if they are long, take a slow processor longer than a service waits.
AT_ONCE = 32


class Service:
    """Asks /v1/search, in its default mode where `mode` is None, and /v1/rerank."""

    def __init__(self, endpoint: Endpoint, mode: str | None) -> None:
        self._endpoint, self._mode = endpoint, mode
        facts = endpoint.get("/v1/collection")
        try:
            self._documents, encoder = int(facts["documents"]), facts["encoder"]
            self._at_once, self._depth = min(int(facts["max_queries"]), AT_ONCE), int(facts["max_top_k"])
            name = f"service {mode or facts['default_mode']}"
            self.facts = SystemFacts(name, "service", str(encoder["fingerprint"]), int(encoder["dim"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CareError(f"{endpoint.base}/v1/collection is not that of a CARE Search service") from error
        if self._depth < DEPTH:
            raise CareError(f"{endpoint.base}: gives {self._depth} hits at most; start it with CARE_MAX_TOP_K={DEPTH}")

    def answer(self, task: Task) -> list[Ranking]:
        match task.data:
            case RetrievalSet() as data:
                ask = self._asker(data)
                blocks = range(0, len(data.queries), self._at_once)
                return [ranking for start in blocks for ranking in ask(data.queries[start : start + self._at_once])]
            case RerankSet() as data:
                return [self._rerank(*each) for each in zip(data.queries, data.candidates, strict=True)]
            case PairSet():
                raise NotApplicable("a service searches and reranks; it has no similarity of two sentences")

    def online(self, task: Task, data: RetrievalSet) -> Callable[[str], Ranking]:
        ask = self._asker(data)
        return lambda query: ask([query])[0]

    def _asker(self, data: RetrievalSet) -> Callable[[Sequence[str]], list[Ranking]]:
        """A function from queries to rankings of the set's rows; refuses a service of other documents."""
        advice = "build its collection from the set's corpus"
        base, count = self._endpoint.base, len(data.documents)
        if self._documents != count:
            raise CareError(f"{base} serves {self._documents:,} documents, {data.name} has {count:,}: {advice}")
        rows = {id: row for row, id in enumerate(data.document_ids)}
        mode = {"mode": self._mode} if self._mode else {}

        def ask(queries: Sequence[str]) -> list[Ranking]:
            body = {"query": list(queries), "top_k": DEPTH, "fields": [], **mode}
            rankings = []
            for result in self._endpoint.post("/v1/search", body)["results"]:
                hits = [(hit["id"], hit["score"]) for hit in result["hits"]]
                unknown = next((id for id, _ in hits if id not in rows), None)
                if unknown is not None:
                    raise CareError(f"{base} found document {unknown!r}, which {data.name} does not have: {advice}")
                rankings.append(_ranking([(rows[id], score) for id, score in hits]))
            return rankings

        return ask

    def _rerank(self, query: str, candidates: Sequence[tuple[str, int]]) -> Ranking:
        body = {"query": query, "documents": [text for text, _ in candidates]}
        results = self._endpoint.post("/v1/rerank", body)["results"]
        return _ranking([(result["index"], result["relevance_score"]) for result in results])


def _ranking(hits: Sequence[tuple[int, float]]) -> Ranking:
    """In the order in which the service gave them."""
    return np.array([row for row, _ in hits], np.int64), np.array([score for _, score in hits], np.float32)
