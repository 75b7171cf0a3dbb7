"""Texts to unit vectors through the engine, for whoever wants the vectors themselves. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens
from service.cache import Cache, EmbeddingCache
from service.engine.jobs import EncodeJob, Outcome, Vector
from service.engine.queue import ONLINE_JOBS, Dispatcher
from service.line import Deadline, Line, Prepared
from service.reading import read
from service.serving import Serving
from service.settings import Settings

_Note = tuple[Tokens, Vector | None]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Unit vectors (texts, dim) in the order of the texts, and how many tokens the encoder read."""

    vectors: NDArray[np.float32]
    tokens: int


class Embedder:
    """Encodes texts as either side reads them. Queries are remembered; documents, which seldom come twice, are not.

    `model` is the name by which clients know the encoder: that of its folder.
    """

    def __init__(self, settings: Settings, dispatcher: Dispatcher, cache: Cache) -> None:
        self.model = settings.encoder.resolve().name
        self._settings = settings
        self._dispatcher = dispatcher
        self._known = EmbeddingCache(cache)

    async def embed(
        self, serving: Serving, texts: Sequence[str], side: Side, *, deadline: Deadline, bulk: bool = False
    ) -> Embeddings:
        """Encodes any number of texts, a crowd of them as bulk; raises what the dispatcher raises."""
        line = Line(
            self._dispatcher,
            serving,
            deadline,
            portion=self._settings.queue_limit,
            bulk=bulk or len(texts) > ONLINE_JOBS,
        )
        tokens = 0

        async def prepare(portion: Sequence[str]) -> list[Prepared[_Note]]:
            nonlocal tokens
            ready = await read(portion, serving.encoder, side)
            ids = [text.tokens for text in ready if text.tokens is not None]
            tokens += sum(map(len, ids))
            known: Sequence[Vector | None] = [None] * len(ids)
            if side is Side.QUERY:
                known = await self._known.get(serving.encoder, ids)
            return [
                (None if vector is not None else EncodeJob(text.text, side, token), (token, vector))
                for text, token, vector in zip(ready, ids, known, strict=True)
            ]

        def finish(note: _Note, outcome: Outcome | None) -> Vector:
            token, known = note
            if known is not None:
                return known
            assert outcome is not None  # an item without a known vector has a job
            assert outcome.vector is not None  # which only encodes
            if side is Side.QUERY:
                self._known.put(serving.encoder, [token], [outcome.vector])
            return outcome.vector

        return Embeddings(np.stack(await line.run(texts, prepare, finish)), tokens)


def shorten(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first dimensions of each vector, made unit vectors again; encoders trained for it lose little."""
    if dimensions == vectors.shape[1]:
        return vectors
    return normalise(vectors[:, :dimensions])


def normalise(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of length one; a row of zeros, which has no direction, stays."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32, copy=False)


def blend(query: Vector, documents: Sequence[Vector]) -> Vector:
    """The vector (dim,) to search with: the mean of a query's and its imagined documents' vectors, a unit vector again.

    (Σ documents + query) / (N + 1), equation 8 of SL-HyDE; the norm keeps scores cosines.
    """
    mean: Vector = np.mean([query, *documents], axis=0, dtype=np.float32)
    return normalise(mean)
