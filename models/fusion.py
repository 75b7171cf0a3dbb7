"""Fuses the dense and the lexical ranking of the same rows into one.

Score fusion is the default: reciprocal rank forgets by how much the first hit won, which costs up to 15 points of
nDCG@10 where one side is much better than the other (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from models.lexical import Ranking

DocumentsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""The document row of each passage row."""
RECIPROCAL_OFFSET = 60.0
CANDIDATES = 100
"""How many rows of each ranking enter a fusion."""
# Fitted to development queries (docs/experiments/fusion.md). The dense side weighs more if its first hit is far above
# its tenth and its last, relative to a perfect match, and if BM25's best hit is close to the next ones.
INTERCEPT, DENSE_TENTH, DENSE_LAST, LEXICAL_SECOND, LEXICAL_TENTH = -3.1, 1.5, 1.9, 1.4, 1.7
# Factors for the dense and lexical scores of a passage that is not its document's first (docs/experiments/words.md).
LATER_DENSE, LATER_LEXICAL = 0.96, 0.9


class Mode(StrEnum):
    """Which scores rank the documents."""

    DENSE = "dense"
    LEXICAL = "lexical"
    HYBRID = "hybrid"


class Fusion(StrEnum):
    """How the two rankings of a hybrid search become one."""

    SCORES = "scores"
    RECIPROCAL = "reciprocal"


def fuse(dense: Ranking, lexical: Ranking, fusion: Fusion, weight: float | None = None, trust: float = 0.0) -> Ranking:
    """Ranks the union of both; `weight` is the dense side's share in score fusion, by query if None.

    `trust` raises that of an encoder that is better than most (`dense_trust` of its encoder.json).
    """
    if fusion is Fusion.RECIPROCAL:
        return fuse_reciprocal(dense, lexical)
    return fuse_scores(dense, lexical, query_weight(dense[1], lexical[1], trust) if weight is None else weight)


def best_passages(
    passages: NDArray[np.int64], scores: NDArray[np.float32], documents_of: DocumentsOf, later: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Returns the best passage of each document, best first and ties by row: documents, passages and scores.

    A passage that is not its document's first counts `later` of its score: a long document has several chances.
    """
    documents = documents_of(passages)
    follows = (passages > 0) & (documents_of(np.maximum(passages - 1, 0)) == documents)
    weighed = np.where(follows, np.minimum(scores, np.float32(later) * scores), scores)
    order = np.lexsort((passages, -weighed))
    _, first = np.unique(documents[order], return_index=True)
    chosen = order[np.sort(first)]
    return documents[chosen], passages[chosen], weighed[chosen]


def reorder(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """The order of a ranking after reranking, as places of the old one: places with a score are sorted by it, best
    first, among themselves; a place without one (NaN) stays."""
    order = np.arange(len(scores))
    scored = np.flatnonzero(~np.isnan(scores))
    order[scored] = scored[np.argsort(-scores[scored], kind="stable")]
    return order


def query_weight(dense: NDArray[np.float32], lexical: NDArray[np.float32], trust: float = 0.0) -> float:
    """Returns the dense side's share for one query, from how its two lists of scores (best first) look."""
    if not len(dense) or not len(lexical):
        return 0.5
    tenth, last = dense[min(9, len(dense) - 1)], dense[-1]
    shape = (
        INTERCEPT
        + trust
        + DENSE_TENTH * (dense[0] - tenth) / (max(1 - tenth, 0) + 1e-3)
        + DENSE_LAST * (dense[0] - last) / (max(1 - last, 0) + 1e-3)
        + LEXICAL_SECOND * (lexical[1] / lexical[0] if len(lexical) > 1 else 0.0)
        + LEXICAL_TENTH * (lexical[9] / lexical[0] if len(lexical) > 9 else 0.0)
    )
    return float(1 / (1 + np.exp(-shape)))


def fuse_scores(dense: Ranking, lexical: Ranking, weight: float) -> Ranking:
    """weight · dense + (1 - weight) · lexical, dense stretched to 0 … 1, lexical divided by its best."""
    words = lexical[1] / lexical[1].max() if len(lexical[1]) else lexical[1]
    return _sum((dense[0], weight * _stretch(dense[1])), (lexical[0], (1 - weight) * words))


def fuse_reciprocal(dense: Ranking, lexical: Ranking) -> Ranking:
    """Sum of 1 / (60 + rank) over both rankings."""
    return _sum((dense[0], _reciprocal(len(dense[0]))), (lexical[0], _reciprocal(len(lexical[0]))))


def _stretch(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    if not len(scores):
        return scores
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low) if high > low else np.ones_like(scores)


def _reciprocal(count: int) -> NDArray[np.float32]:
    return (1.0 / (RECIPROCAL_OFFSET + np.arange(1, count + 1))).astype(np.float32)


def _sum(first: Ranking, second: Ranking) -> Ranking:
    rows, inverse = np.unique(np.concatenate([first[0], second[0]]), return_inverse=True)
    scores = np.bincount(inverse, weights=np.concatenate([first[1], second[1]]), minlength=len(rows))
    order = np.lexsort((rows, -scores))
    return rows[order].astype(np.int64), scores[order].astype(np.float32)
