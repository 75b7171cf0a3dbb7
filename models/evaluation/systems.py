"""The systems that an evaluation compares: an encoder, BM25, and the two together as the service fuses them.

A system ranks a corpus for a list of queries; the fusion and the lexical index are the ones that serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from models.fusion import CANDIDATES, Fusion, fuse
from models.lexical import LexicalIndex, Ranking
from models.spec import Side


class Encoder(Protocol):
    """Anything that turns texts into unit vectors: OnnxEncoder, TorchEncoder."""

    def encode(self, texts: Sequence[str], side: Side) -> NDArray[np.float32]: ...


class System(Protocol):
    """Ranks documents by row for each query."""

    def rank(self, documents: Sequence[str], queries: Sequence[str]) -> list[Ranking]: ...


class Dense:
    """Exact search by the cosine of embeddings."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._corpus: tuple[Sequence[str], NDArray[np.float32]] | None = None

    def rank(self, documents: Sequence[str], queries: Sequence[str]) -> list[Ranking]:
        vectors = self._encode_corpus(documents)
        scores = self._encoder.encode(queries, Side.QUERY) @ vectors.T
        return [top(row, CANDIDATES) for row in scores]

    def _encode_corpus(self, documents: Sequence[str]) -> NDArray[np.float32]:
        # Sets that share a corpus come one after the other; it is encoded once.
        if self._corpus is None or self._corpus[0] is not documents:
            self._corpus = (documents, self._encoder.encode(documents, Side.DOCUMENT))
        return self._corpus[1]


class Lexical:
    """BM25."""

    def __init__(self) -> None:
        self._corpus: tuple[Sequence[str], LexicalIndex] | None = None

    def rank(self, documents: Sequence[str], queries: Sequence[str]) -> list[Ranking]:
        if self._corpus is None or self._corpus[0] is not documents:
            self._corpus = (documents, LexicalIndex.build(documents))
        return [self._corpus[1].search(query, CANDIDATES) for query in queries]


class Hybrid:
    """Both, fused as the service does."""

    def __init__(self, dense: Dense, lexical: Lexical, fusion: Fusion, weight: float | None) -> None:
        self._dense, self._lexical, self._fusion, self._weight = dense, lexical, fusion, weight

    def rank(self, documents: Sequence[str], queries: Sequence[str]) -> list[Ranking]:
        pairs = zip(self._dense.rank(documents, queries), self._lexical.rank(documents, queries), strict=True)
        return [fuse(dense, lexical, self._fusion, self._weight) for dense, lexical in pairs]


def top(scores: NDArray[np.float32], k: int) -> Ranking:
    """The k best rows of a score vector, ties by row."""
    k = min(k, len(scores))
    rows = np.argpartition(-scores, k - 1)[:k]
    order = np.lexsort((rows, -scores[rows]))
    return rows[order].astype(np.int64), scores[rows[order]]
