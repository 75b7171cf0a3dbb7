"""The systems that an evaluation compares: an encoder, BM25, and the two together as the service fuses them.

A system ranks a corpus for a list of queries; the fusion and the lexical index are the ones that serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.fusion import CANDIDATES, Fusion, fuse
from models.lexical import LexicalIndex, Ranking
from models.spec import Side

Made = TypeVar("Made")


class Encoder(Protocol):
    """Anything that turns texts into unit vectors: OnnxEncoder, TorchEncoder."""

    def encode(self, texts: Sequence[str], side: Side) -> NDArray[np.float32]: ...


class System(Protocol):
    """Ranks documents by row for each query."""

    def rank(self, documents: Sequence[str], queries: Sequence[str]) -> list[Ranking]: ...


class _Last(Generic[Made]):
    """Calls a function and keeps its last result: sets share a corpus, and systems share each other's rankings."""

    def __init__(self, make: Callable[..., Made]) -> None:
        self._make = make
        self._last: tuple[tuple[Sequence[str], ...], Made] | None = None

    def __call__(self, *lists: Sequence[str]) -> Made:
        if self._last is None or any(a is not b for a, b in zip(self._last[0], lists, strict=True)):
            self._last = (lists, self._make(*lists))
        return self._last[1]


class Dense:
    """Exact search by the cosine of embeddings."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._vectors = _Last(lambda documents: encoder.encode(documents, Side.DOCUMENT))
        self._rankings = _Last(self._rank)

    def rank(self, documents: Sequence[str], queries: Sequence[str]) -> list[Ranking]:
        return self._rankings(queries, documents)

    def _rank(self, queries: Sequence[str], documents: Sequence[str]) -> list[Ranking]:
        scores = self._encoder.encode(queries, Side.QUERY) @ self._vectors(documents).T
        return [top(row, CANDIDATES) for row in scores]


class Lexical:
    """BM25."""

    def __init__(self) -> None:
        self._index = _Last(LexicalIndex.build)
        self._rankings = _Last(self._rank)

    def rank(self, documents: Sequence[str], queries: Sequence[str]) -> list[Ranking]:
        return self._rankings(queries, documents)

    def _rank(self, queries: Sequence[str], documents: Sequence[str]) -> list[Ranking]:
        index = self._index(documents)
        return [index.search(query, CANDIDATES) for query in queries]


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
