"""Chooses the pairs of each batch, deterministic in (seed, step), so that a resumed run gets the same batches.

A batch comes from one source. Each pass over a source has a new order. With a leaf size the order is made of leaves:
groups of pairs whose documents lie close together in an encoder's space, so that in-batch negatives are hard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from models.encoder.packed.kernels import send
from models.errors import BadData
from models.training.kept import Kept
from models.training.tables import PairTable
from models.training.texts import Rows

Embeddings = NDArray[np.float32] | Kept


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of texts: query i is answered by document i; hard negatives follow after all positives."""

    source: str
    queries: Rows
    documents: Rows
    hypothetical: Rows
    """Document rows that are read with queries, and `owners`, the positions of those queries."""
    owners: Rows
    known: tuple[Rows, Rows]
    """Query rows and document rows of the batch that are known to belong together."""
    drawn: tuple[Rows, Rows]
    """Positions of queries, and the document rows that were drawn as their hard negatives."""

    def answers(self, device: torch.device) -> torch.Tensor:
        """(queries, documents): which documents are known to answer which query, the labels among them."""
        queries, query_places = np.unique(self.queries, return_inverse=True)
        documents, document_places = np.unique(self.documents, return_inverse=True)
        found = np.searchsorted(documents, self.known[1]).clip(max=len(documents) - 1)
        here = documents[found] == self.known[1]
        asked = np.searchsorted(queries, self.known[0][here])
        # Built where it is needed: of a large batch it is hundreds of megabytes.
        table = torch.zeros(len(queries), len(documents), dtype=torch.bool, device=device)
        table[send(asked, device), send(found[here], device)] = True
        return table[send(query_places, device)][:, send(document_places, device)]

    def others(self, device: torch.device) -> torch.Tensor:
        """(queries, documents): which documents are hard negatives of other queries alone."""
        positives = len(self.queries)
        table = torch.zeros(positives, len(self.documents), dtype=torch.bool, device=device)
        table[:, positives:] = True
        places = positives + np.searchsorted(self.documents[positives:], self.drawn[1])
        table[send(self.drawn[0], device), send(places, device)] = False
        return table


class BatchDealer:
    """Deals the batch of any of `steps` steps."""

    def __init__(
        self, table: PairTable, weights: Mapping[str, float], *, size: int, steps: int, negatives: int, seed: int,
        epochs: float = 1, leaf: int | None = None, embeddings: Embeddings | None = None, trial: bool = False,
    ) -> None:  # fmt: skip
        self._table, self._size, self._negatives, self._seed = table, size, negatives, seed
        self._leaf, self._embeddings, self._trial = leaf, embeddings, trial
        self._names = sorted(table.sources)
        rows = np.array([len(table.sources[name]) for name in self._names], dtype=np.int64)
        shares = batches_of(rows, size, epochs).astype(np.float64)
        if weights:
            shares = np.array([weights.get(name, weights.get("*", 1.0)) for name in self._names])
        if not shares.sum() > 0:
            raise BadData("every source has weight 0: give one of them another in data.weights")
        counts = apportion(shares / shares.sum(), steps)
        # How many different pairs of each source the steps draw.
        self._wanted = np.minimum(counts * np.minimum(size, rows), rows)
        self._plan = np.random.default_rng([seed, 0]).permutation(np.repeat(np.arange(len(counts)), counts))
        # How many batches of its source came before each step.
        self._turn = np.empty(steps, dtype=np.int64)
        for source in range(len(counts)):
            self._turn[self._plan == source] = np.arange(counts[source])
        self._orders: dict[tuple[int, int], Rows] = {}

    def deal(self, step: int) -> Batch:
        chance = np.random.default_rng([self._seed, 1, step])
        source = int(self._plan[step])
        pairs = self._pairs(source, int(self._turn[step]))
        table = self._table
        places = (chance.random(len(pairs)) * table.positives.sizes(pairs)).astype(np.int64)
        drawn = self._draw_negatives(pairs, chance)
        documents = np.concatenate([table.positives.pick(pairs, places), np.unique(drawn[1])])
        owners, hypothetical = table.hypothetical.gather(pairs)
        queries = table.query[pairs]
        answered, answers = table.answers.gather(queries)
        return Batch(self._names[source], queries, documents, hypothetical, owners, (queries[answered], answers), drawn)

    def drawn(self) -> Rows:
        """Returns the pairs that the steps draw. Leaves need whole sources, except in a trial."""
        parts = []
        for at, name in enumerate(self._names):
            rows, wanted = self._table.sources[name], self._wanted[at]
            if self._leaf is None or self._trial or not wanted:
                rows = np.random.default_rng([self._seed, 2, at, 0]).permutation(rows)[:wanted]
            parts.append(rows)
        return np.sort(np.concatenate(parts))

    def _pairs(self, source: int, turn: int) -> Rows:
        """Cuts the source's orders, one after the other, into batches: no pair is left out between two of them."""
        total = len(self._table.sources[self._names[source]])
        size = min(self._size, total)
        cycle, first = divmod(turn * size, total)
        rows = self._order(source, cycle)[first : first + size]
        return rows if len(rows) == size else np.concatenate([rows, self._order(source, cycle + 1)[: size - len(rows)]])

    def _order(self, source: int, cycle: int) -> Rows:
        if (source, cycle) not in self._orders:
            for old in [key for key in self._orders if key[0] == source and key[1] < cycle - 1]:
                del self._orders[old]
            chance = np.random.default_rng([self._seed, 2, source, cycle])
            rows = chance.permutation(self._table.sources[self._names[source]])
            if self._leaf is not None and self._embeddings is not None:
                if self._trial:
                    rows = rows[: self._wanted[source]]
                vectors = self._embeddings[self._table.positives.pick(rows, np.zeros_like(rows))].astype(np.float32)
                leaves = split(rows, vectors, self._leaf, chance)
                rows = np.concatenate([leaves[leaf] for leaf in chance.permutation(len(leaves))])
            self._orders[source, cycle] = rows
        return self._orders[source, cycle]

    def _draw_negatives(self, pairs: Rows, chance: np.random.Generator) -> tuple[Rows, Rows]:
        """Returns positions in `pairs`, and the document row of each negative that was drawn for one."""
        owners, drawn = list[int](), list[int]()
        for place, pair in enumerate(pairs if self._negatives else ()):
            own = self._table.negatives[pair]
            if len(own):
                chosen = chance.choice(own, size=min(self._negatives, len(own)), replace=False)
                owners.extend([place] * len(chosen))
                drawn.extend(chosen)
        return np.asarray(owners, dtype=np.int64), np.asarray(drawn, dtype=np.int64)


def batches_of(rows: Rows, size: int, epochs: float) -> Rows:
    """Returns how many batches each source needs, given its number of pairs, for each to come `epochs` times."""
    return np.ceil(epochs * rows / np.minimum(size, rows)).astype(np.int64)


def steps_of(
    rows: Rows, batch: int, epochs: float | None, steps: int | None, most: int | None, *, weighted: bool = False
) -> int:
    """Returns how many steps a stage has: as given, or enough for every pair to come `epochs` times.

    `rows` are the sources' numbers of pairs. With weights no source has a number of its own: all pairs count as one.
    """
    sources = rows.sum(keepdims=True) if weighted else rows
    wanted = steps if steps is not None else int(batches_of(sources, batch, epochs or 1).sum())
    return min(wanted, most or wanted)


def apportion(shares: NDArray[np.float64], total: int) -> Rows:
    """Splits `total` into whole numbers as close to the shares as possible."""
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    short = total - int(counts.sum())
    counts[np.argsort(-(exact - counts), kind="stable")[:short]] += 1
    return counts


def split(rows: Rows, embeddings: NDArray[np.float32], leaf: int, chance: np.random.Generator) -> list[Rows]:
    """Groups of at most `leaf` rows, halved along random directions until they are small enough."""
    if len(rows) <= leaf:
        return [rows]
    along = embeddings @ chance.standard_normal(embeddings.shape[1], dtype=np.float32)
    order = np.argsort(along, kind="stable")
    half = len(rows) // 2
    return [
        group for part in (order[:half], order[half:]) for group in split(rows[part], embeddings[part], leaf, chance)
    ]
