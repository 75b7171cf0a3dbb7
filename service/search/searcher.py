"""Runs a search from a parsed request to its response: check, cache, tokenise, rank, rerank, fetch, write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import orjson

from indexer.errors import BadCollection
from indexer.store.canaries import Canary, failures_of
from indexer.store.documents import is_blank
from models.encoder.spec import Side
from models.errors import EncoderAway, did_you_mean
from models.fusion import Mode, reorder
from service.cache.redis import Kind
from service.engine.jobs import EXPIRED, Found, Options, Outcome, Reranked, SearchJob, Vector
from service.engine.queue import ONLINE_JOBS
from service.errors import DeadlineExceeded, InvalidRequest, NotReady, RateLimited
from service.limits import ANYONE, Key
from service.metrics import Metrics, Timings
from service.search.embedder import blend
from service.search.portions import PORTION, Deadline, Portions, Prepared, ReadText, cut, tokenise
from service.search.request import HydeStatus, SearchRequest
from service.search.results import View, best_passages, marked_terms, result_json

if TYPE_CHECKING:
    from service.cache.cache import Cache, ResultKeys
    from service.engine.queue import Dispatcher
    from service.limits import Rates
    from service.search.embedder import Embedder, Reranker
    from service.search.hyde import Hyde
    from service.serving.serving import Serving
    from service.settings import Settings

logger = logging.getLogger(__name__)

LOOP_DOCUMENTS = 50_000  # that the event loop filters itself, because a thread would take longer
# In JSON they need no escape, but many programs that read lines (httpx, requests) end one there.
LINE_ENDS = "\x85\u2028\u2029"
HYDE_SHARE = 0.75  # of the time left, for imagining documents; the rest is for a search without them
Known = Sequence[tuple[Vector | None, HydeStatus | None]]
"""The vector of each text, None if the engine encodes it, and whether imagined documents are in it."""
PROBE = SearchRequest(query="ready", top_k=1, mode=Mode.HYBRID, cache=False)


@dataclass(frozen=True, slots=True)
class Searcher:
    """Answers requests from the serving that it is given.

    `hyde` is None if no language model is configured, `reranker` if none is loaded. `explaining` writes passages and
    explanations in one thread: more would share the interpreter, and leave less to the event loop.
    """

    settings: Settings
    dispatcher: Dispatcher
    cache: Cache
    keys: ResultKeys
    metrics: Metrics
    embedder: Embedder
    hyde: Hyde | None
    rates: Rates
    reranker: Reranker | None = None
    explaining: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "explaining"))

    def close(self) -> None:
        """Drops what waits to be written; its requests are answered or gone."""
        self.explaining.shutdown(wait=False, cancel_futures=True)

    async def search(self, serving: Serving, request: SearchRequest, key: Key = ANYONE) -> tuple[bytes, Timings]:
        """Returns body and timings; raises InvalidRequest, BadFilter, DeadlineExceeded, and the dispatcher's errors."""
        run = _Run(self, serving, request, key)
        await run.check(self.settings.max_queries)
        results = await run.results(self.settings.max_answer_bytes)
        timings = run.end()
        body = b'{"results":[%b],"snapshot":%b,"timings_ms":%b}'
        return body % (b",".join(results), orjson.dumps(serving.version), timings.as_json()), timings

    async def stream(self, serving: Serving, request: SearchRequest, key: Key = ANYONE) -> AsyncGenerator[bytes, None]:
        """Yields a line per query, in order, each as soon as it is there, and a last one; raises as `search` does."""
        run, settings = _Run(self, serving, request, key), self.settings
        await run.check(settings.max_stream_queries)
        end, left, answered = perf_counter() + settings.max_stream_seconds, settings.max_stream_bytes, 0
        async with contextlib.aclosing(run.outcomes()) as outcomes:
            async for query, outcome in outcomes:
                line = _one_line(await run.write(query, outcome)) + b"\n"
                left -= len(line)
                if left < 0:
                    more = f"larger than {settings.max_stream_bytes} bytes (CARE_MAX_STREAM_BYTES)"
                    raise InvalidRequest("query", f"the answer is {more}; {_rest(answered)}")
                if perf_counter() > end:
                    taken = f"took more than {settings.max_stream_seconds:g} s (CARE_MAX_STREAM_SECONDS)"
                    raise DeadlineExceeded(f"the answer {taken}; {_rest(answered)}")
                yield line
                answered += 1
        yield b'{"snapshot":%b,"timings_ms":%b}\n' % (orjson.dumps(serving.version), run.end().as_json())

    async def probe(self, serving: Serving, mode: Mode = Mode.HYBRID) -> None:
        """Sends a real query through encoder, both indexes and documents; raises NotReady if it is not answered."""
        timeout_ms = self.settings.probe_timeout_ms
        run = _Run(self, serving, PROBE.model_copy(update={"timeout_ms": timeout_ms, "mode": mode}), probe=True)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                (result,) = await run.results(self.settings.max_answer_bytes)
        except (TimeoutError, DeadlineExceeded):
            raise NotReady(f"a query did not get through within {timeout_ms} ms") from None
        if mode is Mode.HYBRID and serving.documents() and not orjson.loads(result)["hits"]:
            raise NotReady(f"a query found nothing in snapshot {serving.version}")

    async def admit(self, serving: Serving) -> None:
        """As `probe`, for a snapshot that is to be served; by words alone while the encoder's server is away."""
        try:
            await self.probe(serving)
        except EncoderAway as error:
            logger.warning("snapshot %s is served by words alone for now: %s", serving.version, error)
            await self.probe(serving, Mode.LEXICAL)

    async def check_canaries(self, serving: Serving, canaries: Sequence[Canary]) -> None:
        """Searches the canaries of the collection; raises BadCollection naming those that are not found."""
        answers = []
        for canary in canaries:
            top_k = min(canary.within, self.settings.max_top_k)
            request = SearchRequest(
                query=canary.query, top_k=top_k, mode=Mode.HYBRID, fields=(), cache=False, bulk=True
            )
            body, _ = await self.search(serving, request)
            (result,) = orjson.loads(body)["results"]
            answers.append([hit["id"] for hit in result["hits"]])
        if failures := failures_of(canaries, answers):
            raise BadCollection(f"{serving.version} is not served: {failures}; force the rollback to serve it anyway")


def _one_line(result: bytes) -> bytes:
    for character in LINE_ENDS:
        result = result.replace(character.encode(), b"\\u%04x" % ord(character))
    return result


def _rest(answered: int) -> str:
    return f"ask again for the queries after the first {answered}" if answered else "ask for fewer hits or fields"


@dataclass(frozen=True, slots=True)
class _Query:
    """A query in the engine: what is needed to write its result and to cache it."""

    text: ReadText
    hyde: HydeStatus | None
    keep_vector: bool
    key: bytes | None


class _Run:
    """One request under way; its methods stand in the order of its walk."""

    def __init__(
        self, shared: Searcher, serving: Serving, request: SearchRequest, key: Key = ANYONE, *, probe: bool = False
    ) -> None:
        self._shared = shared
        self._serving = serving
        self._request = request
        self._queries = request.queries
        self._key = key
        self._within = serving.fix(key.filters)
        self._filters = tuple([clause.to_filter() for clause in request.filters])
        self._cached = request.cache and shared.cache.enabled
        self._timings = Timings()
        self._began = perf_counter()
        self._asked_seconds = 0.0
        settings, start = shared.settings, request.offset or 0
        shown = (frozenset(request.fields), request.passages, request.explain, request.min_score)
        self._view = View(*shown, start, start + request.top_k, request.facets)
        # Pages are slices of one ranking only if all are ranked to one depth, which decides how far the indexes are
        # searched and what enters a fusion.
        self._rerank_depth = request.rerank_depth
        wanted = max(request.top_k, self._rerank_depth)
        depth = settings.max_top_k if request.offset is not None or request.facets else wanted
        self._options = Options(
            request.mode or settings.default_mode,
            depth,
            self._within + (serving.evaluable(self._filters) if self._within else self._filters),
            request.fusion,
            request.weight,
            serving.encoder.spec.dense_trust,
            self._view.needs_evidence,
        )
        self._portions = Portions(
            shared.dispatcher,
            serving,
            Deadline(request.timeout_ms, settings.timeout_ms),
            size=min(PORTION, settings.queue_limit),
            bulk=request.bulk or len(self._queries) > ONLINE_JOBS,
            probe=probe,
        )

    async def check(self, most: int) -> None:
        """Checks what the request's types cannot express; `most` is the number of queries allowed."""
        request, settings, serving = self._request, self._shared.settings, self._serving
        queries = self._queries
        if not 1 <= len(queries) <= most:
            raise InvalidRequest("query", f"must hold between 1 and {most} texts, got {len(queries)}")
        for number, query in enumerate(queries):
            if is_blank(query):
                path = "query" if isinstance(request.query, str) else f"query[{number}]"
                raise InvalidRequest(path, "must not be empty")
        if not 1 <= request.top_k <= settings.max_top_k:
            raise InvalidRequest("top_k", f"must be between 1 and {settings.max_top_k}")
        if (request.offset or 0) + request.top_k > settings.max_top_k:
            raise InvalidRequest("offset", f"offset + top_k must be at most {settings.max_top_k}")
        values, most = sum(c.values for f in request.filters for c in f.walk()), settings.max_filter_values
        if values > most:
            raise InvalidRequest("filters", f"name {values} values together, at most {most} are taken; ask for fewer")
        if request.hyde_documents:
            self._check_hyde()
        if self._rerank_depth and self._shared.reranker is None:
            how = "set CARE_RERANKER to the folder of one (care encoder import makes it, then care export)"
            raise InvalidRequest("rerank", f"no reranker is loaded; {how}, or search without")
        if self._rerank_depth > settings.max_top_k:
            raise InvalidRequest("rerank", f"depth must be at most {settings.max_top_k}, the largest top_k")
        fields: list[str] = []
        if self._options.filters or request.facets:
            # BadFilter is raised here, for one request, and not in a batch; the engine finds the mask ready.
            if len(serving.snapshot.documents) <= LOOP_DOCUMENTS:
                fields = self._admit()
            else:
                fields = await asyncio.to_thread(self._admit)
        for facet in request.facets:
            if facet not in fields:
                known, hint = ", ".join(fields) or "none", did_you_mean(facet, fields)
                raise InvalidRequest("facets", f"the collection has no field {facet}; it has {known}{hint}")
        if not request.cache:
            self._shared.cache.bypass(Kind.RESULT, len(queries))

    def _admit(self) -> list[str]:
        """Evaluates the filters; returns the fields that facets may name."""
        serving = self._serving
        if self._within and self._filters:
            serving.require_filters(self._filters, self._within)
        if self._options.filters:
            serving.allowed(self._options.filters)
        return serving.fields(self._within) if self._request.facets else []

    def _check_hyde(self) -> None:
        if self._shared.hyde is None:
            raise InvalidRequest("hyde", "no language model is configured; set CARE_HYDE_URL and CARE_HYDE_MODEL")
        if self._options.mode is Mode.LEXICAL:
            raise InvalidRequest("hyde", "imagined documents have no part in mode lexical; use dense or hybrid")
        calls = len(self._queries) * self._request.hyde_documents
        if calls > (most := self._shared.settings.hyde_max_calls):
            less = f"send fewer queries or ask for fewer documents, at most {most} together"
            raise InvalidRequest("hyde", f"would call the language model {calls} times; {less}")

    async def results(self, most_bytes: int) -> list[bytes]:
        """Returns the JSON of one result per query, in order; raises InvalidRequest if they are too large together."""
        queries, left = self._queries, most_bytes

        async def write(query: _Query | bytes, outcome: Outcome | None) -> bytes:
            nonlocal left
            result = await self.write(query, outcome)
            left -= len(result)
            if left < 0:
                less = "ask fewer queries, a smaller top_k or fewer fields, or for lines (Accept: application/x-ndjson)"
                raise InvalidRequest("query", f"the answer is larger than {most_bytes} bytes; {less}")
            return result

        if len(queries) <= self._portions.size and not self._rerank_depth:
            return await self._portions.single(queries, self._prepare, write)
        written = []
        async with contextlib.aclosing(self._portions.outcomes(queries, self._prepare)) as outcomes:
            if not self._rerank_depth:
                async for query, outcome in outcomes:  # other requests have their turns between two of them
                    self._portions.deadline.seconds_left()
                    written.append(await write(query, outcome))
                return written
            # All queries are ranked before any is reranked, which may use up the time limit.
            ranked = [each async for each in outcomes]
        for query, outcome in ranked:
            written.append(await write(query, await self._rerank(query, outcome)))
            await asyncio.sleep(0)
        return written

    async def outcomes(self) -> AsyncGenerator[tuple[_Query | bytes, Outcome | None], None]:
        """Yields what `write` needs for each query, in order, each as soon as it is there. Must be closed."""
        async with contextlib.aclosing(self._portions.outcomes(self._queries, self._prepare)) as found:
            async for query, outcome in found:
                yield query, await self._rerank(query, outcome)

    async def _rerank(self, query: _Query | bytes, outcome: Outcome | None) -> Outcome | None:
        """Puts the first documents into the order of the reranker's scores, if wanted and as far as there is time."""
        if not self._rerank_depth or isinstance(query, bytes) or outcome is None:
            return outcome
        began, found, serving = perf_counter(), outcome.found, self._serving
        reranker = self._shared.reranker
        assert reranker is not None  # `check` refuses the request otherwise
        depth = min(self._rerank_depth, len(found.documents))
        deadline, bulk = self._portions.deadline, self._portions.bulk
        scores = np.full(len(found.documents), np.nan, np.float32)
        with contextlib.suppress(DeadlineExceeded):
            deadline.seconds_left()  # reading and tokenising the texts of many queries takes long, too
            rows = list(zip(found.documents[:depth].tolist(), found.passages[:depth].tolist(), strict=True))
            wanted = marked_terms(query.text.text) if self._options.mode is not Mode.DENSE else []
            texts = await asyncio.to_thread(best_passages, serving, rows, wanted)
            scored = await reranker.score(serving, query.text.text, texts, deadline=deadline, bulk=bulk, partial=True)
            scores[:depth] = scored.scores
        order = reorder(scores)
        reranked = Reranked(scores[order], depth)
        self._shared.metrics.rerank("complete" if reranked.scored == depth else "partial")
        self._timings.rerank += perf_counter() - began
        parts = (found.documents[order], found.passages[order], found.scores[order])
        return replace(outcome, found=Found(*parts, found.evidence, reranked))

    async def _prepare(self, queries: Sequence[str]) -> list[Prepared[_Query | bytes]]:
        """Looks results up in the cache and makes jobs of the other queries."""
        if not self._cached:
            return await self._make_jobs(queries, [None] * len(queries))
        keys = self._shared.keys(self._serving, self._request, queries, self._key.tenant)
        known = await self._shared.cache.get(Kind.RESULT, keys)
        prepared: list[Prepared[_Query | bytes]] = [(None, result or b"") for result in known]
        missing = [place for place, result in enumerate(known) if result is None]
        if missing:
            jobs = await self._make_jobs([queries[place] for place in missing], [keys[place] for place in missing])
            for place, job in zip(missing, jobs, strict=True):
                prepared[place] = job
        return prepared

    async def _make_jobs(self, queries: Sequence[str], keys: Sequence[bytes | None]) -> list[Prepared[_Query | bytes]]:
        encoder = self._serving.encoder
        began = perf_counter()
        texts = [cut(query, encoder) for query in queries]
        is_dense = self._options.mode is not Mode.LEXICAL
        # Tokenising costs more than a refusal, so an overload is noticed before it.
        keep = self._cached and is_dense
        self._portions.require_room([SearchJob(text.text, self._options, keep_vector=keep) for text in texts])
        if is_dense:
            texts = await tokenise(queries, encoder, Side.QUERY)
        self._timings.tokenize += perf_counter() - began
        jobs: list[Prepared[_Query | bytes]] = []
        for text, key, (vector, hyde) in zip(texts, keys, await self._vectors(texts), strict=True):
            keep = self._cached and vector is None and text.tokens is not None
            job = SearchJob(text.text, self._options, text.tokens, None if vector is None else vector.tobytes(), keep)
            # A plain result in place of one with imagined documents is not cached.
            key = None if hyde is HydeStatus.FAILED else key
            jobs.append((job, _Query(text, hyde, keep, key)))
        return jobs

    async def _vectors(self, texts: Sequence[ReadText]) -> Known:
        """Finds vectors that the engine need not encode: imagined by HyDE, encoded by a server, or cached."""
        if self._request.hyde_documents:
            return await self._ask_server(texts, await self._imagine(texts))
        tokens = [text.tokens for text in texts if text.tokens is not None]
        if not self._cached or not tokens:
            return await self._ask_server(texts, [(None, None)] * len(texts))
        cache, encoder = self._shared.cache, self._serving.encoder
        return [(vector, None) for vector in await cache.get_embeddings(encoder, tokens, self._key.tenant)]

    async def _ask_server(self, texts: Sequence[ReadText], found: Known) -> Known:
        """Fills in the vectors that are missing if the encoder is behind an address."""
        missing = [text.text for text, (vector, _) in zip(texts, found, strict=True) if vector is None]
        is_dense = self._options.mode is not Mode.LEXICAL
        if self._serving.encoder.spec.address is None or not missing or not is_dense:
            return found
        began = perf_counter()
        asked = iter(await self._embed(missing, Side.QUERY))
        self._asked_seconds += perf_counter() - began
        return [(next(asked) if vector is None else vector, hyde) for vector, hyde in found]

    async def _imagine(self, texts: Sequence[ReadText]) -> Known:
        hyde = self._shared.hyde
        assert hyde is not None  # `check` refuses the request otherwise
        count, seconds = self._request.hyde_documents, self._portions.deadline.seconds_left() * HYDE_SHARE
        await self._require_budget(len(texts) * count)
        imagined = await asyncio.gather(*(hyde.imagine(text.text, count, seconds) for text in texts))
        for some in imagined:
            self._shared.metrics.hyde(HydeStatus.USED if some else HydeStatus.FAILED)
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

    async def _require_budget(self, calls: int) -> None:
        """Raises RateLimited if the key's budget does not hold this number of calls of the language model."""
        key = self._key
        if key.model_calls is None:
            return
        if calls > key.model_calls.count:  # no wait would help
            less = f"this key may call it {key.model_calls}; ask for fewer queries or documents"
            raise InvalidRequest("hyde", f"would call the language model {calls} times, and {less}")
        if seconds := await self._shared.rates.take(f"{key.id}:calls", key.model_calls, calls):
            spent = f"this key may call the language model {key.model_calls}, and its budget holds less than {calls}"
            raise RateLimited(f"{spent}; search without hyde, or see Retry-After", seconds)

    async def _embed(self, texts: Sequence[str], side: Side) -> Sequence[Vector]:
        embed, deadline, bulk = self._shared.embedder.embed, self._portions.deadline, self._request.bulk
        cached, tenant = self._request.cache, self._key.tenant
        try:
            embedded = await embed(
                self._serving, texts, side, bulk=bulk, deadline=deadline, cached=cached, tenant=tenant
            )
        except EncoderAway as error:
            raise EncoderAway(f"{error}; mode lexical works without it", error.expected_seconds) from None
        return list(embedded.vectors)

    async def write(self, query: _Query | bytes, outcome: Outcome | None) -> bytes:
        """Fetches the documents of a ranking, writes them as JSON, and caches result and embedding."""
        if isinstance(query, bytes):
            return query  # the cached result
        assert outcome is not None  # a query that is not cached has a job
        began, text = perf_counter(), query.text
        facts = (self._options, self._view, text.text, text.truncated, query.hyde)
        finish = partial(result_json, self._serving, outcome.found, *facts)
        reranked = outcome.found.reranked
        if self._view.needs_evidence:
            result = await self._in_turn(finish, is_late=reranked is not None)
        else:
            result = finish()
        # What was not scored in time may be another time.
        if query.key is not None and (reranked is None or reranked.scored == reranked.depth):
            self._shared.cache.put(Kind.RESULT, query.key, result)
        if query.keep_vector and query.text.tokens is not None and outcome.vector is not None:
            encoder, tokens = self._serving.encoder, query.text.tokens
            self._shared.cache.put_embedding(encoder, tokens, outcome.vector, self._key.tenant)
        self._timings.fetch += perf_counter() - began
        return result

    async def _in_turn(self, finish: Callable[[], bytes], *, is_late: bool) -> bytes:
        """Writes passages and explanations in their thread, after those of earlier requests: each may take a second.

        Raises DeadlineExceeded. An answer that `is_late` because the reranker may use the whole time limit has
        CARE_TIMEOUT_MS once more. One that has begun when its request ends is finished before the next begins.
        """
        seconds = self._shared.settings.timeout_ms / 1000 if is_late else self._portions.deadline.seconds_left()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.get_running_loop().run_in_executor(self._shared.explaining, finish)
        except TimeoutError:
            raise DeadlineExceeded(EXPIRED) from None

    def end(self) -> Timings:
        """Counts the request once its last result is written, and returns the time of its stages."""
        if self._portions.batches:  # none if all results were cached
            self._timings.add_engine(self._portions.waited_seconds, self._portions.batches)
        self._timings.encode += self._asked_seconds
        self._timings.total = perf_counter() - self._began
        self._shared.metrics.search(len(self._queries), self._timings)
        return self._timings
