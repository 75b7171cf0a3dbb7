"""A pair's query encoder in its document encoder's place: its vectors of documents, moved to where the other's lie.

Vectors of one encoder lie nearer to each other than to its partner's, so a document that the query encoder read would
outrank better ones that the document encoder did. What sets the two apart is learnt from passages that both have read.
Knows nothing of files, snapshots or labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from models.spec import EncoderSpec

SAMPLE = 256
"""Passages that both encoders read."""
NEAREST = 10
"""So many of them are ranked for each: what is found at the top of a ranking is what must compare."""
# Sums may differ in their last digits from machine to machine.
SLOPE_DIGITS = 4

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """A vector v of the query encoder becomes slope · v + offset (dim,), which is no unit vector."""

    slope: float
    offset: Vectors

    @classmethod
    def fit(cls, fresh: Vectors, indexed: Vectors) -> Self:
        """Of the two encoders' vectors (passages, dim) of the same passages.

        The offset brings the mean of the ones to that of the others. The slope gives the nearest of the ones the scores
        of the nearest of the others, in order: each passage asks, as the query encoder reads it.
        """
        means = fresh.mean(axis=0), indexed.mean(axis=0)
        own, others = (_nearest(fresh, some - mean) for some, mean in zip((fresh, indexed), means, strict=True))
        # One passage has no others, and says only where it should lie itself.
        slope = round(float((own * others).sum() / (own * own).sum()), SLOPE_DIGITS) if own.any() else 1.0
        return cls(slope, (means[1] - np.float32(slope) * means[0]).astype(np.float32))

    def __call__(self, vectors: NDArray[np.floating[Any]]) -> Vectors:
        """`vectors` (any number, dim) where the other encoder would have put them."""
        corrected: Vectors = np.float32(self.slope) * vectors.astype(np.float32, copy=False) + self.offset
        return corrected


def _nearest(queries: Vectors, passages: Vectors) -> Vectors:
    """The scores (queries, at most NEAREST) of the nearest passages, best first; a query is none of its own."""
    scores = queries @ passages.T
    np.fill_diagonal(scores, -np.inf)
    nearest: Vectors = -np.sort(-scores, axis=1)[:, : min(NEAREST, len(queries) - 1)]
    return nearest


class Named(Protocol):
    """An encoder, of which only the name matters."""

    @property
    def spec(self) -> EncoderSpec: ...
    @property
    def fingerprint(self) -> str: ...


def names_of(encoder: Named) -> frozenset[str]:
    """The fingerprints of this encoder in whatever numbers it computes: the difference is too small to be corrected."""
    return encoder.spec.fingerprints | {encoder.fingerprint}


def sample_rows(rows: int, count: int = SAMPLE) -> NDArray[np.int64]:
    """At most `count` of so many rows, at equal distances, ascending."""
    return np.unique(np.linspace(0, rows - 1, min(count, rows), dtype=np.int64))
