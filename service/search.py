"""The hot path: a parsed request to the bytes of its answer. Knows nothing of HTTP.

validate → cache → tokenise → batcher → fetch → bytes, each stage timed once.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import orjson

from indexer.store import Filter
from models.spec import Side
from models.tokenizer import Tokens
from service.cache import Cache, key_of
from service.engine.batcher import Batcher, Outcome
from service.engine.protocol import Job, Mode, Options
from service.errors import InvalidRequest, NotReady
from service.metrics import Metrics
from service.results import result_json
from service.schemas import Part, SearchRequest
from service.serving import Serving
from service.settings import Settings
from service.snippet import marked_terms
from service.timings import Timings

# Longer queries are cut before they are tokenised: no language has so many characters to a token on average, and a
# megabyte of text would hold up everyone else, in the tokenizer and in the lexical index.
CHARACTERS_PER_TOKEN = 8
# What the event loop does itself, because a thread would take longer: filter so many documents, tokenise so many
# queries, write so many hits before it looks at other requests.
LOOP_DOCUMENTS = 50_000
LOOP_QUERIES = 8
LOOP_HITS = 100
PROBE = SearchRequest(query="ready", top_k=1, mode=Mode.HYBRID)


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer, and what it took."""

    body: bytes
    timings: Timings


@dataclass(frozen=True, slots=True)
class _Query:
    """One query as the engine gets it: cut where it is too long."""

    text: str
    tokens: Tokens | None
    truncated: bool


class Searcher:
    """Answers requests from the serving that it is given."""

    def __init__(self, settings: Settings, batcher: Batcher, cache: Cache, metrics: Metrics) -> None:
        self._settings = settings
        self._batcher = batcher
        self._cache = cache
        self._metrics = metrics

    async def search(self, serving: Serving, request: SearchRequest) -> Answer:
        """The whole answer to a request; raises InvalidRequest, BadFilter, Overloaded, EngineFailed, ShuttingDown."""
        began = perf_counter()
        timings = Timings()
        queries = self._check(request)
        options = self._options(request)
        parts = frozenset(request.fields)
        if options.filters:
            await _check_filters(serving, options.filters)
        if not self._cache.enabled:
            results = await self._compute(serving, queries, options, parts, timings)
        else:
            results = await self._compute_missing(serving, queries, options, parts, timings)
        timings.total = perf_counter() - began
        self._metrics.search(len(queries), timings)
        head = b'{"results":[%b],"snapshot":%b,"timings_ms":%b}'
        return Answer(head % (b",".join(results), orjson.dumps(serving.version), timings.as_json()), timings)

    async def probe(self, serving: Serving) -> None:
        """Sends a real query through encoder, both indexes and documents; raises NotReady where it is not answered."""
        timeout_ms = self._settings.probe_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                (result,) = await self._compute(
                    serving, PROBE.queries, self._options(PROBE), frozenset(PROBE.fields), Timings(), probe=True
                )
        except TimeoutError:
            raise NotReady(f"a query did not get through within {timeout_ms} ms") from None
        if not orjson.loads(result)["hits"]:
            raise NotReady(f"a query found nothing in snapshot {serving.version}")

    async def _compute_missing(
        self, serving: Serving, queries: Sequence[str], options: Options, parts: frozenset[Part], timings: Timings
    ) -> list[bytes]:
        """Results from the cache where it has them, else computed and put there; query by query."""
        names = (serving.version, serving.encoder.fingerprint, options, sorted(parts))
        keys = [key_of(*names, query) for query in queries]
        known = await self._cache.get(keys)
        missing = [position for position, value in enumerate(known) if value is None]
        if missing:
            asked = [queries[position] for position in missing]
            computed = await self._compute(serving, asked, options, parts, timings)
            fresh = dict(zip((keys[position] for position in missing), computed, strict=True))
            self._cache.put(fresh)
            return [fresh[key] if value is None else value for key, value in zip(keys, known, strict=True)]
        return [value for value in known if value is not None]

    async def _compute(
        self,
        serving: Serving,
        texts: Sequence[str],
        options: Options,
        parts: frozenset[Part],
        timings: Timings,
        *,
        probe: bool = False,
    ) -> list[bytes]:
        """One result per text, in order, through the engine."""
        began = perf_counter()
        queries = await _tokenize(serving, texts, options.mode)
        submitted = perf_counter()
        jobs = [Job(query.text, options, query.tokens) for query in queries]
        futures = self._batcher.submit(serving, jobs, probe=probe)
        outcomes = [await futures[0]] if len(futures) == 1 else await asyncio.gather(*futures)
        answered = perf_counter()
        timings.add_engine(answered - submitted, (outcome.times for outcome in outcomes))
        results = await _fetch(serving, queries, outcomes, parts)
        timings.tokenize = submitted - began
        timings.fetch = perf_counter() - answered
        return results

    def _check(self, request: SearchRequest) -> list[str]:
        """The queries, once everything that the request's shape cannot say was checked."""
        queries = request.queries
        most = self._settings.max_queries
        if not 1 <= len(queries) <= most:
            raise InvalidRequest("query", f"must hold between 1 and {most} texts, got {len(queries)}")
        for number, query in enumerate(queries, start=1):
            if _is_blank(query):
                which = "" if isinstance(request.query, str) else f"text {number} of the list "
                raise InvalidRequest("query", f"{which}must not be empty")
        if not 1 <= request.top_k <= self._settings.max_top_k:
            raise InvalidRequest("top_k", f"must be between 1 and {self._settings.max_top_k}")
        return queries

    def _options(self, request: SearchRequest) -> Options:
        filters = tuple(clause.to_filter() for clause in request.filters)
        mode = request.mode or self._settings.default_mode
        return Options(mode, request.top_k, filters, request.fusion, request.weight)


def _is_blank(text: str) -> bool:
    """Whether there is nothing to see in a text: spaces, control characters and invisible marks at most."""
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)


async def _check_filters(serving: Serving, filters: tuple[Filter, ...]) -> None:
    """Raises BadFilter here, where it concerns one request, and not in a batch; the engine finds the mask ready."""
    if len(serving.snapshot.documents) <= LOOP_DOCUMENTS:
        serving.allowed(filters)
    else:
        await asyncio.to_thread(serving.allowed, filters)


async def _tokenize(serving: Serving, texts: Sequence[str], mode: Mode) -> list[_Query]:
    limit = serving.encoder.spec.max_length * CHARACTERS_PER_TOKEN
    cut = [text[:limit] for text in texts]
    tokens: Sequence[Tokens | None] = [None] * len(cut)
    if mode is not Mode.LEXICAL:
        if len(cut) <= LOOP_QUERIES:
            tokens = serving.encoder.tokenize(cut, Side.QUERY)
        else:
            tokens = await asyncio.to_thread(serving.encoder.tokenize, cut, Side.QUERY)
    return [
        _Query(short, token, len(short) < len(text) or (token is not None and token.truncated))
        for text, short, token in zip(texts, cut, tokens, strict=True)
    ]


async def _fetch(
    serving: Serving, queries: Sequence[_Query], outcomes: Sequence[Outcome], parts: frozenset[Part]
) -> list[bytes]:
    results = []
    written = 0
    for query, outcome in zip(queries, outcomes, strict=True):
        wanted = marked_terms(query.text) if Part.SNIPPET in parts else []
        results.append(result_json(serving, outcome.found, parts, wanted, truncated=query.truncated))
        written += len(outcome.found.documents)
        if written > LOOP_HITS:
            written = 0
            await asyncio.sleep(0)
    return results
