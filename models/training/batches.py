"""Which pairs meet in a batch. Deterministic in (seed, step), so that a resumed run deals the same batches.

A batch comes from one source and is made of *leaves*: groups of pairs whose documents lie close together in the
start encoder's space, found by splitting the source along random directions until groups are small. Neighbours
make hard negatives; many leaves from all over the source keep the easy ones in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.training.data import PairTable, Rows

Embeddings = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One batch: pair rows, the document row of each pair's positive, and document rows of hard negatives."""

    source: str
    pairs: Rows
    positives: Rows
    negatives: Rows


class BatchDealer:
    """Deals the batch of any step."""

    def __init__(
        self,
        table: PairTable,
        weights: Mapping[str, float],
        *,
        default_weight: float,
        size: int,
        leaf: int,
        hard_negatives: int,
        seed: int,
        embeddings: Embeddings,
    ) -> None:
        self._table, self._size, self._leaf = table, size, leaf
        self._hard_negatives, self._seed, self._embeddings = hard_negatives, seed, embeddings
        self._names = sorted(table.sources)
        shares = np.array([weights.get(name, default_weight) for name in self._names], dtype=np.float64)
        if not shares.sum() > 0:
            raise ValueError("every source has weight 0")
        self._shares = shares / shares.sum()
        self._leaves: dict[tuple[str, int], list[Rows]] = {}

    def deal(self, step: int) -> Drawn:
        generator = np.random.default_rng([self._seed, step])
        name = self._names[generator.choice(len(self._names), p=self._shares)]
        pairs = self._draw(name, step, generator)
        positives = np.array([generator.choice(self._table.positives[row]) for row in pairs], dtype=np.int64)
        return Drawn(name, pairs, positives, self._draw_negatives(pairs, generator))

    def _draw(self, name: str, step: int, generator: np.random.Generator) -> Rows:
        leaves = self._leaves_of(name, step)
        wanted = max(1, self._size // self._leaf)
        chosen = generator.choice(len(leaves), size=min(wanted, len(leaves)), replace=False)
        return np.concatenate([leaves[leaf] for leaf in chosen])[: self._size]

    def _draw_negatives(self, pairs: Rows, generator: np.random.Generator) -> Rows:
        drawn: list[int] = []
        for row in pairs if self._hard_negatives else ():
            own = self._table.negatives[row]
            if own:
                drawn.extend(generator.choice(own, size=min(self._hard_negatives, len(own)), replace=False))
        return np.unique(np.asarray(drawn, dtype=np.int64))

    def _leaves_of(self, name: str, step: int) -> list[Rows]:
        """The source's leaves, split anew every 200 steps so that neighbours change."""
        period = step // 200
        key = (name, period)
        if key not in self._leaves:
            self._leaves = {kept: rows for kept, rows in self._leaves.items() if kept[1] == period}
            generator = np.random.default_rng([self._seed, period, self._names.index(name)])
            rows = generator.permutation(self._table.sources[name])
            first = np.array([self._table.positives[row][0] for row in rows])
            self._leaves[key] = split(rows, self._embeddings[first], self._leaf, generator)
        return self._leaves[key]


def split(rows: Rows, embeddings: Embeddings, leaf: int, generator: np.random.Generator) -> list[Rows]:
    """Groups of at most `leaf` rows, halved along random directions until they are small enough."""
    if len(rows) <= leaf:
        return [rows]
    along = embeddings @ generator.standard_normal(embeddings.shape[1], dtype=np.float32)
    order = np.argsort(along, kind="stable")
    half = len(rows) // 2
    return [
        group for part in (order[:half], order[half:]) for group in split(rows[part], embeddings[part], leaf, generator)
    ]
