"""Moves documents that queries of every kind come near to away from queries (docs/adr/0018-hubs.md).

A query encoder misses the vectors that it was trained to find by a little, and some documents lie where such misses go:
they are near to queries that they do not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

NEAREST = 10
"""Number of a document's nearest queries whose mean cosine is its nearness."""
STRENGTH = 0.5
"""Share of the nearness above the usual one that is subtracted from a document's cosines."""
QUERIES, USUAL = "queries", "usual"
# Rows at once: their cosines with 8,192 queries take 32 MB.
ROWS = 1024


class Hubs(NamedTuple):
    """Unit vectors of queries (queries, dim) of many kinds, and how near they usually come to a document."""

    queries: Vectors
    usual: float

    @classmethod
    def of(cls, queries: Vectors, documents: Vectors) -> Hubs:
        """Computes the usual nearness, the mean over these documents."""
        return cls(queries, float(nearness(documents, queries).mean()))

    @classmethod
    def read(cls, tensors: Mapping[str, NDArray[Any]]) -> Hubs | None:
        """Reads the tensors of a file; None if it has none for hubs."""
        if QUERIES not in tensors:
            return None
        return cls(tensors[QUERIES].astype(np.float32), float(tensors[USUAL][0]))

    def moved(self, documents: Vectors) -> Vectors:
        """Returns unit vectors (documents, dim), moved along the mean of the queries: every query has a part of it."""
        mean = self.queries.mean(axis=0)
        shift = STRENGTH * (nearness(documents, self.queries) - self.usual) / (mean @ mean)
        moved = documents - shift[:, None] * mean
        unit: Vectors = moved / np.linalg.norm(moved, axis=1, keepdims=True)
        return unit

    def cut(self, dim: int) -> Hubs:
        """Returns these hubs in the first `dim` dimensions."""
        queries = self.queries[:, :dim]
        return Hubs(queries / np.linalg.norm(queries, axis=1, keepdims=True), self.usual)

    def tensors(self) -> dict[str, NDArray[np.generic]]:
        """Returns the tensors for a file; half precision moves no cosine by more than 0.0005."""
        return {QUERIES: self.queries.astype(np.float16), USUAL: np.array([self.usual], dtype=np.float32)}


def nearness(documents: Vectors, queries: Vectors) -> Vectors:
    """Returns the mean cosine of each document's nearest queries (documents,)."""
    most = min(NEAREST, len(queries))
    found = [
        np.partition(documents[start : start + ROWS] @ queries.T, -most, axis=1)[:, -most:].mean(axis=1)
        for start in range(0, len(documents), ROWS)
    ]
    return np.concatenate([*found, np.zeros(0, dtype=np.float32)])
