"""One search request under way: its queries to results, from the cache or through the engine. Knows nothing of HTTP.

A query is looked up among the results; else read as tokens, whose embedding may be known or blended with imagined
documents; then the engine ranks, and the ranking is written as JSON and remembered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from models.encoder.spec import Side
from service.cache import Cache, EmbeddingCache, Kind, ResultKeys
from service.embed import Embedder, blend
from service.engine.jobs import Mode, Options, Outcome, SearchJob, Vector
from service.errors import InvalidRequest
from service.line import Line, Prepared
from service.metrics import Metrics
from service.reading import ReadText, cut, read
from service.results import Reading, View, result_json
from service.schemas import HydeStatus, Part, SearchRequest
from service.serving import Serving
from service.settings import Settings
from service.snippet import marked_terms
from service.timings import Timings

if TYPE_CHECKING:
    from service.hyde import Hyde

# Of the time that a request has left, imagining takes so much at most: the rest is for the search without documents.
HYDE_SHARE = 0.75

_Vectors = Sequence[tuple[Vector | None, HydeStatus | None]]


class Tools:
    """What all requests share."""

    def __init__(
        self, settings: Settings, cache: Cache, metrics: Metrics, embedder: Embedder, hyde: Hyde | None
    ) -> None:
        self.cache = cache
        self.metrics = metrics
        self.max_answer_bytes = settings.max_answer_bytes
        self.keys = ResultKeys(settings)
        self.embeddings = EmbeddingCache(cache)
        self.embedder = embedder
        self.hyde = hyde


@dataclass(frozen=True, slots=True)
class _Known:
    """A query whose result was remembered."""

    result: bytes


@dataclass(frozen=True, slots=True)
class _Asked:
    """A query in the engine's hands, and the name under which its result is to be remembered."""

    text: ReadText
    hyde: HydeStatus | None
    keep_vector: bool
    key: bytes | None


_Note = _Known | _Asked


class Run:
    """The queries of one request, answered in order from one serving."""

    def __init__(
        self, tools: Tools, serving: Serving, request: SearchRequest, options: Options, view: View, line: Line
    ) -> None:
        """Its time runs from here on."""
        self._tools = tools
        self._serving = serving
        self._request = request
        self._options = options
        self._view = view
        self._line = line
        self._cached = request.cache and tools.cache.enabled
        self._timings = Timings()
        self._began = perf_counter()

    async def results(self) -> list[bytes]:
        """The JSON of one result per query, in order; raises InvalidRequest once they are too large together."""
        left = most = self._tools.max_answer_bytes

        def finish(note: _Note, outcome: Outcome | None) -> bytes:
            nonlocal left
            result = self._finish(note, outcome)
            left -= len(result)
            if left < 0:
                less = "ask fewer queries, a smaller top_k or fewer fields, or for lines (Accept: application/x-ndjson)"
                raise InvalidRequest("query", f"the answer is larger than {most} bytes; {less}")
            return result

        return await self._line.run(self._request.queries, self._prepare, finish)

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The same, each as soon as it is there; to be closed by whoever stops early."""
        return self._line.stream(self._request.queries, self._prepare, self._finish)

    def end(self) -> Timings:
        """What it took, once the last result is there."""
        self._timings.add_engine(self._line.waited_seconds, self._line.batches)
        self._timings.total = perf_counter() - self._began
        return self._timings

    async def _prepare(self, queries: Sequence[str]) -> list[Prepared[_Note]]:
        if not self._cached:
            return [*await self._ask(queries, [None] * len(queries))]
        keys = self._tools.keys(self._serving, self._request, queries)
        known = await self._tools.cache.get(Kind.RESULT, keys)
        missing = [place for place, result in enumerate(known) if result is None]
        prepared: list[Prepared[_Note]] = [(None, _Known(result or b"")) for result in known]
        if missing:
            asked = await self._ask([queries[place] for place in missing], [keys[place] for place in missing])
            for place, each in zip(missing, asked, strict=True):
                prepared[place] = each
        return prepared

    async def _ask(self, queries: Sequence[str], keys: Sequence[bytes | None]) -> list[tuple[SearchJob, _Asked]]:
        """A job for each query that is not known."""
        encoder = self._serving.encoder
        began = perf_counter()
        texts = [cut(query, encoder) for query in queries]
        is_dense = self._options.mode is not Mode.LEXICAL
        # Tokenising costs more than a refusal does, so an overload is noticed before it.
        self._line.require_room(
            [SearchJob(text.text, self._options, keep_vector=self._cached and is_dense) for text in texts]
        )
        if is_dense:
            texts = await read(queries, encoder, Side.QUERY)
        self._timings.tokenize += perf_counter() - began
        jobs = []
        for text, key, (vector, hyde) in zip(texts, keys, await self._vectors(texts), strict=True):
            keep = self._cached and vector is None and text.tokens is not None
            ready = None if vector is None else vector.tobytes()
            job = SearchJob(text.text, self._options, text.tokens, ready, keep)
            # A plain result in place of one with imagined documents is good for this once.
            jobs.append((job, _Asked(text, hyde, keep, None if hyde is HydeStatus.FAILED else key)))
        return jobs

    async def _vectors(self, texts: Sequence[ReadText]) -> _Vectors:
        """The vector to search with, where it is not for the engine to encode, and what HyDE had to do with it."""
        if self._request.hyde_documents:
            return await self._imagine(texts)
        tokens = [text.tokens for text in texts if text.tokens is not None]
        if not self._cached or not tokens:
            return [(None, None)] * len(texts)
        return [(vector, None) for vector in await self._tools.embeddings.get(self._serving.encoder, tokens)]

    async def _imagine(self, texts: Sequence[ReadText]) -> _Vectors:
        hyde = self._tools.hyde
        assert hyde is not None  # a request that asks for it was refused otherwise
        count, left = self._request.hyde_documents, self._line.deadline.seconds_left() * HYDE_SHARE
        imagined = await asyncio.gather(*(hyde.imagine(text.text, count, left) for text in texts))
        for some in imagined:
            self._tools.metrics.hyde(HydeStatus.USED if some else HydeStatus.FAILED)
        documents = [document for some in imagined for document in some]
        if not documents:
            return [(None, HydeStatus.FAILED)] * len(texts)
        queries = await self._embed([text.text for text in texts], Side.QUERY)
        near = iter(await self._embed(documents, self._serving.encoder.spec.document_side))
        blended: list[tuple[Vector | None, HydeStatus | None]] = []
        for query, some in zip(queries, imagined, strict=True):
            own = [next(near) for _ in some]
            blended.append((blend(query, own), HydeStatus.USED) if own else (None, HydeStatus.FAILED))
        return blended

    async def _embed(self, texts: Sequence[str], side: Side) -> Sequence[Vector]:
        embedded = await self._tools.embedder.embed(
            self._serving, texts, side, bulk=self._request.bulk, deadline=self._line.deadline
        )
        return list(embedded.vectors)

    def _finish(self, note: _Note, outcome: Outcome | None) -> bytes:
        if isinstance(note, _Known):
            return note.result
        assert outcome is not None  # a query that is not known has a job
        began = perf_counter()
        wanted = marked_terms(note.text.text) if Part.SNIPPET in self._view.parts else []
        reading = Reading(wanted, note.text.truncated, note.hyde)
        result = result_json(self._serving, outcome.found, self._options, self._view, reading)
        if note.key is not None:
            self._tools.cache.put(Kind.RESULT, {note.key: result})
        if note.keep_vector and note.text.tokens is not None and outcome.vector is not None:
            self._tools.embeddings.put(self._serving.encoder, [note.text.tokens], [outcome.vector])
        self._timings.fetch += perf_counter() - began
        return result
