"""Corrects a query encoder's vectors of documents, to match those of the document encoder.

Vectors of one encoder lie nearer to each other than to its partner's, so a document that the query encoder read would
outrank better ones that the document encoder read. The difference is learnt from passages that both have read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from models.encoder.spec import EncoderSpec

SAMPLE = 512
"""Passages that both encoders read."""
RIDGE = 10.0
"""Strength of the ridge regression, in mean variances of a dimension: there are no more passages than dimensions."""
NEAREST = 10
"""Passages ranked for each: scores at the top of a ranking must compare."""

Vectors = NDArray[np.float32]
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """A vector v of the query encoder becomes v · matrix (dim, dim) + offset (dim,), not of unit length."""

    matrix: Vectors
    offset: Vectors

    @classmethod
    def fit(cls, fresh: NDArray[np.floating[Any]], indexed: NDArray[np.floating[Any]]) -> Self:
        """Learns from both encoders' vectors (passages, dim) of the same passages.

        A ridge regression predicts the gap between the two from the first vector. Then everything is stretched about
        the mean until the ten nearest passages of a passage score alike, rank by rank, for both encoders.
        """
        start, target = fresh.astype(np.float64), indexed.astype(np.float64)
        mean, centre = start.mean(axis=0), target.mean(axis=0)
        apart, residual = start - mean, (target - centre) - (start - mean)
        gram = apart @ apart.T
        # From one passage, or from equal ones, only the offset can be learnt.
        ridge = RIDGE * np.trace(gram) / start.shape[1] or 1.0
        inverse = np.linalg.inv(gram + ridge * np.eye(len(gram)))
        hat = gram @ inverse
        # Each passage as it would be moved if it had not been among those that were learnt from.
        errors = (residual - hat @ residual) / (1 - np.diag(hat)[:, None])
        moved = target - centre - errors
        own, wanted = _nearest(start, moved - moved.mean(axis=0)), _nearest(start, target - centre)
        slope = float((own * wanted).sum() / (own * own).sum()) if own.any() else 1.0
        matrix = slope * (np.eye(start.shape[1]) + apart.T @ inverse @ residual)
        offset = centre - slope * moved.mean(axis=0) - mean @ matrix
        return cls(matrix.astype(np.float32), offset.astype(np.float32))

    def __call__(self, vectors: Vectors) -> Vectors:
        """Moves `vectors` (any number, dim) to where the other encoder would have put them."""
        corrected: Vectors = vectors @ self.matrix + self.offset
        return corrected


class Named(Protocol):
    """An encoder with its names."""

    @property
    def spec(self) -> EncoderSpec: ...
    @property
    def fingerprint(self) -> str: ...


def names_of(encoder: Named) -> frozenset[str]:
    """Returns the encoder's fingerprints in all precisions: their difference is too small to be corrected."""
    return encoder.spec.fingerprints | {encoder.fingerprint}


def _nearest(queries: Matrix, passages: Matrix) -> Matrix:
    """Returns the scores (queries, at most NEAREST) of the nearest passages, best first, without the query itself."""
    scores = queries @ passages.T
    np.fill_diagonal(scores, -np.inf)
    nearest: Matrix = -np.sort(-scores, axis=1)[:, : min(NEAREST, len(queries) - 1)]
    return nearest


def sample_rows(rows: int, count: int) -> NDArray[np.int64]:
    """Returns at most `count` of `rows` rows, at equal distances, ascending, the first and the last among them."""
    count = min(count, rows)
    return np.arange(count, dtype=np.int64) * (rows - 1) // max(count - 1, 1)
