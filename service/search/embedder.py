"""Encodes texts into unit vectors (embeddings, HyDE, posted documents, queries for a server) and scores pairs.

The engine encodes, or the server of an encoder behind an address. Neither texts nor a server's messages are logged.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens
from models.errors import BadEncoder, EncoderAway, EncoderMoved
from service.engine.jobs import EXPIRED, EncodeJob, PairJob, Vector
from service.engine.queue import ONLINE_JOBS
from service.errors import DeadlineExceeded, EngineFailed, Overloaded
from service.limits import OPEN_SECONDS, Breaker
from service.search.portions import CHARACTERS_PER_TOKEN, PORTION, Deadline, Portions, Prepared, tokenise

if TYPE_CHECKING:
    from models.encoder.address import AddressReader, Prompt
    from service.cache.cache import Cache
    from service.engine.queue import Dispatcher
    from service.serving.serving import Serving
    from service.settings import Settings

logger = logging.getLogger(__name__)

SERVER = "the server that encodes"
# Tokens of pairs that are submitted together: some 50 ms of a small reranker's work on a CPU, a few ms on a GPU.
PAIR_TOKENS = {"cpu": 1024, "cuda": 16_384}
ANSWER_SECONDS = 0.005  # that a reranked answer keeps for being written
CONNECTIONS = 32
REQUESTS_AT_ONCE = 4  # for the texts of one request
CHECK_SECONDS = 600.0  # between two looks at the canaries of a server that keeps answering


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Unit vectors (texts, dim) in the order of the texts, and how many tokens the encoder read."""

    vectors: NDArray[np.float32]
    tokens: int


class Embedder:
    """Encodes texts as queries or documents; vectors of queries are cached.

    `model` is the name by which clients know the encoder: that of its folder.
    """

    def __init__(self, settings: Settings, dispatcher: Dispatcher, cache: Cache) -> None:
        self.model = settings.encoder.resolve().name
        self._settings = settings
        self._dispatcher = dispatcher
        self._cache = cache
        self._servers: dict[str, EncoderServer] = {}

    async def embed(
        self, serving: Serving, texts: Sequence[str], side: Side, *, deadline: Deadline, bulk: bool = False,
        cached: bool = True, tenant: bytes = b"",
    ) -> Embeddings:  # fmt: skip
        """Encodes any number of texts, as bulk if they are many; raises what the dispatcher raises.

        Of an encoder behind an address it raises EncoderAway, EncoderMoved and DeadlineExceeded. Embeddings are cached
        for this tenant alone.
        """
        if serving.encoder.spec.address is not None:
            reader = cast("AddressReader", serving.encoder)
            return await self._ask(reader, texts, side, deadline, cached=cached, tenant=tenant)
        bulk = bulk or len(texts) > ONLINE_JOBS
        portions = Portions(
            self._dispatcher, serving, deadline, size=min(PORTION, self._settings.queue_limit), bulk=bulk
        )
        encoder, count = serving.encoder, 0

        async def prepare(portion: Sequence[str]) -> list[Prepared[tuple[Tokens, Vector | None]]]:
            nonlocal count
            ready = await tokenise(portion, encoder, side)
            ids = [text.tokens for text in ready if text.tokens is not None]
            count += sum(map(len, ids))
            known: Sequence[Vector | None] = [None] * len(ids)
            if side is Side.QUERY and cached:
                known = await self._cache.get_embeddings(encoder, ids, tenant)
            return [
                (None if vector is not None else EncodeJob(text.text, side, token), (token, vector))
                for text, token, vector in zip(ready, ids, known, strict=True)
            ]

        vectors: list[Vector] = []
        async with aclosing(portions.outcomes(texts, prepare)) as outcomes:
            async for (token, known), outcome in outcomes:
                vector = known if outcome is None else outcome.vector
                assert vector is not None  # it was cached, or the job was an EncodeJob
                if outcome is not None and side is Side.QUERY and cached:
                    self._cache.put_embedding(encoder, token, vector, tenant)
                vectors.append(vector)
        return Embeddings(np.stack(vectors), count)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.close()

    async def _ask(
        self, encoder: AddressReader, texts: Sequence[str], side: Side, deadline: Deadline, *, cached: bool,
        tenant: bytes,
    ) -> Embeddings:  # fmt: skip
        """Asks the encoder's server for the vectors that are not cached."""
        own = f"{encoder.fingerprint} {encoder.spec.address}"  # the same model may move to another address
        server = self._servers.get(own)
        if server is None:
            server = self._servers[own] = EncoderServer(encoder, self._settings.encoder_timeout_ms / 1000)
        prompts = await asyncio.to_thread(encoder.prompts, texts, side)
        # Characters, because the server sees them; tokens may be an estimate.
        keys = [Tokens([ord(character) for character in prompt.text], truncated=False) for prompt in prompts]
        vectors: list[Vector | None] = [None] * len(texts)
        cached = cached and side is Side.QUERY
        if cached:
            vectors = await self._cache.get_embeddings(encoder, keys, tenant)
        missing = [place for place, vector in enumerate(vectors) if vector is None]
        portions = [missing[start : start + PORTION] for start in range(0, len(missing), PORTION)]
        for start in range(0, len(portions), REQUESTS_AT_ONCE):
            window = portions[start : start + REQUESTS_AT_ONCE]
            asked = [server.embed([prompts[place] for place in some], side, deadline) for some in window]
            for some, found in zip(window, await asyncio.gather(*asked), strict=True):
                for place, vector in zip(some, found, strict=True):
                    vectors[place] = vector
                    if cached:
                        self._cache.put_embedding(encoder, keys[place], vector, tenant)
        complete = [vector for vector in vectors if vector is not None]
        return Embeddings(np.stack(complete), sum(prompt.tokens for prompt in prompts))


@dataclass(frozen=True, slots=True)
class PairScores:
    """The reranker's scores in the order of the documents, NaN for what was not scored in time; the tokens it read."""

    scores: NDArray[np.float32]
    tokens: int


class Reranker:
    """Scores documents against a query by the cross-encoder; `model` is the name by which clients know it.

    Pairs are submitted a portion at a time, in the order of the documents: other queries come between two portions,
    and the time limit ends the work after any of them.
    """

    def __init__(self, settings: Settings, folder: Path, dispatcher: Dispatcher) -> None:
        self.model = folder.resolve().name
        self._dispatcher = dispatcher
        self._portion_tokens = PAIR_TOKENS[settings.device]

    async def score(
        self, serving: Serving, query: str, documents: Sequence[str], *, deadline: Deadline, bulk: bool = False,
        partial: bool = False,
    ) -> PairScores:  # fmt: skip
        """Scores all documents; with `partial`, those that can be scored in time. Raises what the dispatcher raises."""
        reader = serving.reranker
        assert reader is not None  # every serving has one if a reranker is configured
        longest = reader.spec.max_length * CHARACTERS_PER_TOKEN
        texts = [document[:longest] for document in documents]
        pairs = await asyncio.to_thread(reader.tokenizer.pairs, query[:longest], texts)
        scores = np.full(len(pairs), np.nan, np.float32)
        jobs = [PairJob(array("i", pair.ids).tobytes(), pair) for pair in pairs]
        for places in _portions([len(pair) for pair in pairs], self._portion_tokens):
            own = slice(places.start, places.stop)
            try:
                left = deadline.seconds_left() - (ANSWER_SECONDS if partial else 0.0)
                if left <= 0:
                    raise DeadlineExceeded(EXPIRED)
                futures = self._dispatcher.submit(serving, jobs[own], timeout_seconds=left, bulk=bulk)
                async with asyncio.timeout(left):
                    outcomes = await asyncio.gather(*futures)
            except (DeadlineExceeded, TimeoutError, Overloaded) as error:
                if partial:
                    break
                raise DeadlineExceeded(EXPIRED) if isinstance(error, TimeoutError) else error from None
            scores[own] = [float(each.vector[0]) for each in outcomes if each.vector is not None]
        return PairScores(scores, sum(map(len, pairs)))


def _portions(lengths: Sequence[int], tokens: int) -> Iterator[range]:
    """Places of pairs in their order, of at most `tokens` tokens together, at least one."""
    start, total = 0, 0
    for place, length in enumerate(lengths):
        if place > start and total + length > tokens:
            yield range(start, place)
            start, total = place, 0
        total += length
    if lengths:
        yield range(start, len(lengths))


class EncoderServer:
    """Asks the server of one encoder, within a time limit, and looks at its canaries now and then.

    They are asked for before the first text, after every failure, and every few minutes.
    """

    def __init__(self, encoder: AddressReader, timeout_seconds: float) -> None:
        import httpx  # a service whose encoder is here needs none

        self._encoder = encoder
        self._timeout_seconds = timeout_seconds
        limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        self._client = httpx.AsyncClient(headers=encoder.wire.headers(), timeout=None, limits=limits)
        self._unreachable = httpx.RequestError
        self._breaker = Breaker(SERVER)
        self._checking = asyncio.Lock()
        self._checked_at: float | None = None
        self._trouble: EncoderAway | EncoderMoved = EncoderAway(f"{SERVER} does not answer")

    async def embed(self, prompts: Sequence[Prompt], side: Side, deadline: Deadline) -> NDArray[np.float32]:
        """Returns unit vectors (prompts, dim); raises EncoderAway, EncoderMoved, or DeadlineExceeded at the limit."""
        left = deadline.seconds_left()
        if not self._breaker.allows():
            raise type(self._trouble)(str(self._trouble))
        try:
            async with asyncio.timeout(min(self._timeout_seconds, left)):
                await self._check()
                vectors = await self._post([prompt.text for prompt in prompts], side)
        except TimeoutError:
            if left < self._timeout_seconds:
                raise DeadlineExceeded(EXPIRED) from None
            limit = f"no answer within {1000 * self._timeout_seconds:.0f} ms (CARE_ENCODER_TIMEOUT_MS)"
            raise self._fail(_away(limit, OPEN_SECONDS)) from None
        except (EncoderAway, EncoderMoved) as error:
            raise self._fail(error) from None
        self._breaker.succeeded()
        return vectors

    async def close(self) -> None:
        await self._client.aclose()

    def _fail(self, error: EncoderAway | EncoderMoved) -> EncoderAway | EncoderMoved:
        self._checked_at, self._trouble = None, error
        self._breaker.failed(str(error))
        return error

    async def _check(self) -> None:
        """Compares the canaries with those of the encoder folder, unless that was done a short while ago."""
        async with self._checking:
            now = monotonic()
            if self._checked_at is not None and now - self._checked_at < CHECK_SECONDS:
                return
            canaries = self._encoder.canaries
            for side in self._encoder.checked_sides:
                # The first alone: a server that is away is asked once, not for each canary.
                first = await self._post(canaries.texts[:1], side)
                rest = await asyncio.gather(*(self._post([text], side) for text in canaries.texts[1:]))
                canaries.require(np.concatenate([first, *rest]), side, SERVER)
            self._checked_at = now

    async def _post(self, prompts: Sequence[str], side: Side) -> NDArray[np.float32]:
        from models.encoder.address import Refused

        wire = self._encoder.wire
        try:
            response = await self._client.post(wire.route, json=wire.body(prompts, side))
        except self._unreachable as error:
            raise _away(type(error).__name__) from None
        try:
            return wire.vectors(response, len(prompts))
        except EncoderMoved:
            raise EncoderMoved(f"{SERVER} gives vectors of another dimension; run the model that it ran") from None
        except EncoderAway as error:
            raise _away(f"status {response.status_code}", error.expected_seconds) from None
        except Refused:  # the fault of this text, not of the server
            raise EngineFailed(f"{SERVER} refuses this text (status {response.status_code}); shorten it") from None
        except BadEncoder:  # its message may repeat the query
            problem = "an answer that is not usable" if response.is_success else f"status {response.status_code}"
            raise _away(problem) from None


def _away(reason: str, expected_seconds: float = 0.0) -> EncoderAway:
    return EncoderAway(f"{SERVER} does not answer as it should ({reason}); try again later", expected_seconds)


def shorten(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Keeps the first dimensions of each vector and makes them unit vectors again."""
    return vectors if dimensions == vectors.shape[1] else normalise(vectors[:, :dimensions])


def normalise(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales rows to length one; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def blend(query: Vector, documents: Sequence[Vector]) -> Vector:
    """Averages the vectors of a query and its imagined documents (equation 8 of SL-HyDE) to a unit vector (dim,)."""
    mean: Vector = np.mean([query, *documents], axis=0, dtype=np.float32)
    return normalise(mean)
