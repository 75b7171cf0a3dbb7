"""Embeddings that were computed before, by the encoder and the tokens that it reads. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.encoder.tokenizer import TextReader, Tokens
from service.cache.keys import Kind, embedding_key
from service.cache.layers import Cache

Vector = NDArray[np.float32]
STORED = np.dtype("<f4")


class EmbeddingCache:
    """Vectors (dim,) by encoder and tokens, to the bit as they were made."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.enabled = cache.enabled

    async def get(self, encoder: TextReader, tokens: Sequence[Tokens]) -> list[Vector | None]:
        """The embedding of each text, in order, or None if it is not known or has another length than the encoder's."""
        if not self.enabled or not tokens:
            return [None] * len(tokens)
        stored = await self._cache.get(Kind.EMBEDDING, [embedding_key(encoder.fingerprint, text) for text in tokens])
        size = encoder.spec.dim * STORED.itemsize
        return [None if value is None or len(value) != size else np.frombuffer(value, STORED) for value in stored]

    def put(self, encoder: TextReader, tokens: Sequence[Tokens], vectors: Sequence[Vector]) -> None:
        """Keeps one vector per text, in order."""
        if self.enabled and tokens:
            keys = (embedding_key(encoder.fingerprint, text) for text in tokens)
            values = (vector.astype(STORED, copy=False).tobytes() for vector in vectors)
            self._cache.put(Kind.EMBEDDING, dict(zip(keys, values, strict=True)))
