"""The hot path: a parsed request to the bytes of its answer, whole or line by line. Knows nothing of HTTP.

validate → cache → tokenise → engine → fetch → bytes, each stage timed once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from indexer.errors import BadCollection
from indexer.store.canaries import Canary, failures_of
from indexer.store.filters import Filter
from models.errors import did_you_mean
from service.cache import Cache, Kind
from service.embed import Embedder
from service.engine.protocol import Dispatcher, Mode, Options
from service.engine.queue import ONLINE_JOBS
from service.errors import DeadlineExceeded, InvalidRequest, NotReady
from service.line import Deadline, Line
from service.metrics import Metrics
from service.reading import is_blank
from service.results import View
from service.run_search import Run, Tools
from service.schemas import SearchRequest
from service.serving import Serving
from service.settings import Settings
from service.timings import Timings

if TYPE_CHECKING:  # loads an HTTP client that only those need who configured a model
    from service.hyde import Hyde

# Documents that the event loop filters itself, because a thread would take longer.
LOOP_DOCUMENTS = 50_000
PROBE = SearchRequest(query="ready", top_k=1, mode=Mode.HYBRID, cache=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of an answer, and what it took."""

    body: bytes
    timings: Timings


class Searcher:
    """Answers requests from the serving that it is given."""

    def __init__(
        self,
        settings: Settings,
        dispatcher: Dispatcher,
        cache: Cache,
        metrics: Metrics,
        embedder: Embedder,
        hyde: Hyde | None,
    ) -> None:
        """`hyde`: the language model that imagines documents, where one is configured."""
        self._settings = settings
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._tools = Tools(settings, cache, metrics, embedder, hyde)

    async def search(self, serving: Serving, request: SearchRequest) -> Answer:
        """The whole answer; raises InvalidRequest, BadFilter, DeadlineExceeded, and what the dispatcher raises."""
        run = await self._begin(serving, request, self._settings.max_queries)
        results = await run.results()
        timings = run.end()
        self._metrics.search(len(results), timings)
        body = b'{"results":[%b],"snapshot":%b,"timings_ms":%b}'
        return Answer(body % (b",".join(results), orjson.dumps(serving.version), timings.as_json()), timings)

    async def stream(self, serving: Serving, request: SearchRequest) -> AsyncGenerator[bytes, None]:
        """A line per query, in order, each as soon as it is there, and a last one; raises as `search` does."""
        run = await self._begin(serving, request, self._settings.max_stream_queries)
        async with aclosing(run.stream()) as results:
            async for result in results:
                yield result + b"\n"
        timings = run.end()
        self._metrics.search(len(request.queries), timings)
        yield b'{"snapshot":%b,"timings_ms":%b}\n' % (orjson.dumps(serving.version), timings.as_json())

    async def probe(self, serving: Serving) -> None:
        """Sends a real query through encoder, both indexes and documents; raises NotReady where it is not answered."""
        timeout_ms = self._settings.probe_timeout_ms
        line = Line(self._dispatcher, serving, Deadline(timeout_ms, timeout_ms), probe=True)
        view = _view(PROBE)
        run = Run(self._tools, serving, PROBE, self._options(PROBE, view), view, line)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                (result,) = await run.results()
        except (TimeoutError, DeadlineExceeded):
            raise NotReady(f"a query did not get through within {timeout_ms} ms") from None
        if serving.documents and not orjson.loads(result)["hits"]:
            raise NotReady(f"a query found nothing in snapshot {serving.version}")

    async def check_canaries(self, serving: Serving, canaries: Sequence[Canary]) -> None:
        """Asks the canaries of the collection; raises BadCollection that names those whose documents are not found."""
        answers = []
        for canary in canaries:
            top_k = min(canary.within, self._settings.max_top_k)
            request = SearchRequest(
                query=canary.query, top_k=top_k, mode=Mode.HYBRID, fields=(), cache=False, bulk=True
            )
            (result,) = orjson.loads((await self.search(serving, request)).body)["results"]
            answers.append([hit["id"] for hit in result["hits"]])
        if failures := failures_of(canaries, answers):
            raise BadCollection(f"{serving.version} is not served: {failures}; force the rollback to serve it anyway")

    async def _begin(self, serving: Serving, request: SearchRequest, most: int) -> Run:
        """The request under way, once everything that its shape cannot say was checked."""
        deadline = Deadline(request.timeout_ms, self._settings.timeout_ms)
        self._check(request, most)
        bulk = request.bulk or len(request.queries) > ONLINE_JOBS
        line = Line(self._dispatcher, serving, deadline, portion=self._settings.queue_limit, bulk=bulk)
        view = _view(request)
        options = self._options(request, view)
        run = Run(self._tools, serving, request, options, view, line)
        if options.filters:
            await _check_filters(serving, options.filters)
        _check_facets(serving, request.facets)
        if not request.cache:
            self._tools.cache.bypass(Kind.RESULT, len(request.queries))
        return run

    def _check(self, request: SearchRequest, most: int) -> None:
        queries = request.queries
        if not 1 <= len(queries) <= most:
            raise InvalidRequest("query", f"must hold between 1 and {most} texts, got {len(queries)}")
        for number, query in enumerate(queries):
            if is_blank(query):
                path = "query" if isinstance(request.query, str) else f"query[{number}]"
                raise InvalidRequest(path, "must not be empty")
        if not 1 <= request.top_k <= self._settings.max_top_k:
            raise InvalidRequest("top_k", f"must be between 1 and {self._settings.max_top_k}")
        if (request.offset or 0) + request.top_k > self._settings.max_top_k:
            raise InvalidRequest("offset", f"offset + top_k must be at most {self._settings.max_top_k}")
        values = sum(part.values for clause in request.filters for part in clause.walk())
        if values > self._settings.max_filter_values:
            most = self._settings.max_filter_values
            raise InvalidRequest("filters", f"name {values} values together, at most {most} are taken; ask for fewer")
        if request.hyde_documents:
            self._check_hyde(request)

    def _check_hyde(self, request: SearchRequest) -> None:
        if self._tools.hyde is None:
            raise InvalidRequest("hyde", "no language model is configured; set CARE_HYDE_URL and CARE_HYDE_MODEL")
        if self._mode(request) is Mode.LEXICAL:
            raise InvalidRequest("hyde", "imagined documents have no part in mode lexical; use dense or hybrid")
        calls, most = len(request.queries) * request.hyde_documents, self._settings.hyde_max_calls
        if calls > most:
            less = f"send fewer queries or ask for fewer documents, at most {most} together"
            raise InvalidRequest("hyde", f"would call the language model {calls} times; {less}")

    def _options(self, request: SearchRequest, view: View) -> Options:
        filters = tuple(clause.to_filter() for clause in request.filters)
        mode = self._mode(request)
        # Pages are slices of one ranking only if all are ranked to one depth: how many documents are wanted decides
        # how far the indexes are searched and what enters a fusion.
        deep = request.offset is not None or request.facets
        depth = self._settings.max_top_k if deep else request.top_k
        return Options(mode, depth, filters, request.fusion, request.weight, view.needs_evidence)

    def _mode(self, request: SearchRequest) -> Mode:
        return request.mode or self._settings.default_mode


def _view(request: SearchRequest) -> View:
    start = request.offset or 0
    shown = (frozenset(request.fields), request.passages, request.explain, request.min_score)
    return View(*shown, start, start + request.top_k, request.facets)


async def _check_filters(serving: Serving, filters: tuple[Filter, ...]) -> None:
    """Raises BadFilter here, where it concerns one request, and not in a batch; the engine finds the mask ready."""
    if len(serving.snapshot.documents) <= LOOP_DOCUMENTS:
        serving.allowed(filters)
    else:
        await asyncio.to_thread(serving.allowed, filters)


def _check_facets(serving: Serving, facets: tuple[str, ...]) -> None:
    fields = serving.fields if facets else []
    for facet in facets:
        if facet not in fields:
            known, hint = ", ".join(fields) or "none", did_you_mean(facet, fields)
            raise InvalidRequest("facets", f"the collection has no field {facet}; it has {known}{hint}")
