"""Draws hard negatives from a ranking: a window of ranks, without known answers, clearly below the positive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


def draw_negatives(
    rows: Rows, known: Rows, scores: NDArray[np.float32], *, ranks: tuple[int, int], count: int, below: float | None,
    chance: np.random.Generator,
) -> Rows:  # fmt: skip
    """Returns at most `count` of the ranked `rows`, in their order.

    Ranks are counted without the `known` rows (answers, and negatives that the pair has); the first of `ranks` is
    included, the last is not. With `below`, only rows whose score is at most that.
    """
    new = ~np.isin(rows, known)
    window = slice(*ranks)
    kept = rows[new][window]
    if below is not None:
        kept = kept[scores[new][window] <= below]
    drawn: Rows = kept[np.sort(chance.choice(len(kept), size=min(count, len(kept)), replace=False))]
    return drawn
