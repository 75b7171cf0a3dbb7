"""Encodes texts into unit vectors through the engine: for /v1/embeddings, /v1/rerank, HyDE and posted documents."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens
from service.engine.jobs import EncodeJob, Vector
from service.engine.queue import ONLINE_JOBS
from service.search.portions import PORTION, Deadline, Portions, Prepared, tokenise

if TYPE_CHECKING:
    from service.cache.cache import Cache
    from service.engine.queue import Dispatcher
    from service.serving.serving import Serving
    from service.settings import Settings


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

    async def embed(
        self,
        serving: Serving,
        texts: Sequence[str],
        side: Side,
        *,
        deadline: Deadline,
        bulk: bool = False,
        tenant: bytes = b"",
    ) -> Embeddings:
        """Encodes any number of texts, as bulk if they are many; raises what the dispatcher raises."""
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
            if side is Side.QUERY:
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
                if outcome is not None and side is Side.QUERY:
                    self._cache.put_embedding(encoder, token, vector, tenant)
                vectors.append(vector)
        return Embeddings(np.stack(vectors), count)


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
