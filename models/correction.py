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

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """A vector v of the query encoder becomes slope · v + offset (dim,), which is no unit vector.

    It is the line, the same in every dimension, that brings the one encoder's vectors nearest to the other's.
    """

    slope: float
    offset: Vectors

    @classmethod
    def fit(cls, fresh: Vectors, indexed: Vectors) -> Self:
        """Least squares, of the two encoders' vectors (passages, dim) of the same passages."""
        means = fresh.mean(axis=0, dtype=np.float64), indexed.mean(axis=0, dtype=np.float64)
        apart, wanted = fresh - means[0], indexed - means[1]
        spread = float((apart**2).sum())
        # One passage alone says only where it should lie.
        slope = float((apart * wanted).sum()) / spread if spread > 0 else 1.0
        return cls(slope, (means[1] - slope * means[0]).astype(np.float32))

    def __call__(self, vectors: NDArray[np.floating[Any]]) -> Vectors:
        """`vectors` (any number, dim) where the other encoder would have put them."""
        corrected: Vectors = np.float32(self.slope) * vectors.astype(np.float32, copy=False) + self.offset
        return corrected


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
