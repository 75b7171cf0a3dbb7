"""Systems over HTTP to evaluate: a running service, and HyDE by an endpoint with OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from models.encoder.spec import Side
from models.endpoint import Endpoint, chat
from models.errors import CareError
from models.evaluation.cache import Vectors, text_hash, written_whole
from models.evaluation.readers import Reader, unit
from models.evaluation.results import SystemFacts
from models.evaluation.sets import PairSet, RerankSet, RetrievalSet, Task
from models.evaluation.systems import DEPTH, NotApplicable
from models.lexical import Ranking
from models.progress import Progress
from models.prompts import ask_for_document, fill

# Queries of one request: more of them, if they are long, take a slow CPU longer than a service waits.
AT_ONCE = 32
TEMPERATURE, MAX_TOKENS = 0.7, 512
REQUESTS_AT_ONCE = 8
Fusing = Literal["mean", "document", "joined"]
"""How a query meets its hypothetical documents (SL-HyDE's table 5): mean of the vectors; documents alone; one text."""


class Service:
    """Asks /v1/search, in its default mode if `mode` is None, and /v1/rerank.

    The service must hold the documents of the set, all of them and no others, under their ids.
    """

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
        """Returns a function from queries to rankings of the set's rows; refuses a service of other documents."""
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
    """Makes a ranking of hits in the order of the service's answer."""
    return np.array([row for row, _ in hits], np.int64), np.array([score for _, score in hits], np.float32)


@dataclass(frozen=True, slots=True)
class Generator:
    """Writes `documents` hypothetical documents a query by a language model; `folder` None keeps nothing."""

    endpoint: Endpoint
    model: str
    documents: int
    folder: Path | None
    at_once: int = REQUESTS_AT_ONCE
    seed: int = 0
    """Which repetition of the experiment this is: each has documents of its own."""

    def write(self, queries: Sequence[str], prompt: str | None) -> list[list[str]]:
        """Writes a document for each query, in each of the `documents` rounds."""
        prompts = [fill(prompt, query=query) if prompt else ask_for_document(query) for query in queries]
        first = self.seed * self.documents
        jobs = [(text, number) for number in range(first, first + self.documents) for text in prompts]
        with ThreadPoolExecutor(self.at_once) as pool:
            written = pool.map(self._write_one, jobs)
            texts = list(Progress(f"{self.model} writes", "documents", len(jobs)).over(written))
        return [texts[start : start + len(prompts)] for start in range(0, len(texts), len(prompts))]

    def _write_one(self, job: tuple[str, int]) -> str:
        prompt, number = job
        if self.folder is None:
            return self._ask(prompt, number)
        settings = f"{self.model} {TEMPERATURE} {MAX_TOKENS} {number}"
        path = self.folder / f"{text_hash(settings, prompt).hex()}.json"
        # A file that cannot be read is replaced, as in every other part of the cache.
        with suppress(OSError, ValueError, LookupError, TypeError):
            return str(json.loads(path.read_bytes())["document"])
        document = self._ask(prompt, number)
        with written_whole(path) as file:
            file.write(json.dumps({"prompt": prompt, "document": document}, ensure_ascii=False).encode())
        return document

    def _ask(self, prompt: str, seed: int) -> str:
        settings = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, "seed": seed}
        document = chat(self.endpoint, self.model, [{"role": "user", "content": prompt}], settings).text.strip()
        if not document:
            raise CareError(f"{self.endpoint.base}: {self.model} wrote nothing; try another model")
        return document


@dataclass(frozen=True, slots=True)
class HydeReader:
    """HyDE: a query's vector is the mean of its own and those of its hypothetical documents, at unit length.

    With other `fusing` it is the mean of the documents alone, or the vector of the query and its documents as one text.
    `seeds` is how many repetitions there are, each by a reader of its own.
    """

    reader: Reader
    generator: Generator
    fusing: Fusing = "mean"
    seeds: int = 1

    @property
    def facts(self) -> SystemFacts:
        plain, count = self.reader.facts, self.generator.documents
        fusing = "" if self.fusing == "mean" else f" ({self.fusing})"
        name = f"HyDE {plain.name}{fusing}" + (f" × {count}" if count > 1 else "")
        if self.seeds == 1:
            return replace(plain, name=name, kind="hyde")
        mean = f"{name}, mean of {self.seeds} seeds"
        return replace(plain, name=f"{name}, seed {self.generator.seed + 1}", kind="hyde", repeats=mean)

    @property
    def trust(self) -> float:
        return self.reader.trust

    def read(self, texts: Sequence[str], side: Side, task: Task, *, cached: bool = True) -> Vectors:
        if isinstance(task.data, PairSet):
            raise NotApplicable("HyDE writes answers to questions, and sentence pairs have none")
        if side is Side.DOCUMENT:
            return self.reader.read(texts, side, task, cached=cached)
        generator = self.generator if cached else replace(self.generator, folder=None)
        written = generator.write(texts, task.hyde_prompt)
        if self.fusing == "joined":
            joined = ["\n".join(parts) for parts in zip(texts, *written, strict=True)]
            return self.reader.read(joined, side, task, cached=cached)
        read = [self.reader.read(texts, side, task, cached=cached)] if self.fusing == "mean" else []
        read += [self.reader.read(documents, Side.DOCUMENT, task, cached=cached) for documents in written]
        return unit(sum(read[1:], start=read[0]))
