"""Metrics of one ranking and of score lists, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


def ndcg(grades: Mapping[str, int], ranking: Sequence[str], k: int = 10) -> float:
    """Discounted cumulative gain of the first k (gain = grade, discount log2), as a share of the best possible."""
    gain = sum(grades.get(document, 0) / math.log2(rank + 2) for rank, document in enumerate(ranking[:k]))
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)[:k]
    best = sum(grade / math.log2(rank + 2) for rank, grade in enumerate(ideal))
    return gain / best if best else 0.0


def average_precision(relevant: Sequence[bool], k: int = 10) -> float:
    """Average precision of the first k of a ranking, over the relevant ones that could have been there."""
    found, total = 0, 0.0
    for rank, hit in enumerate(relevant[:k], start=1):
        if hit:
            found += 1
            total += found / rank
    possible = min(k, sum(relevant))
    return total / possible if possible else 0.0


def pearson(first: Sequence[float], second: Sequence[float]) -> float:
    return float(np.corrcoef(np.asarray(first), np.asarray(second))[0, 1])
