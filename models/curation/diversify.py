"""Drops texts that are like too many kept ones: the evolving index of CARE's section 4.1 and table 14."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.curation.frame import Outcome, Step, Tally, in_blocks
from models.curation.rows import Row, passages_of, query_of
from models.curation.vectors import STORED, GrowingIndex, RecordFile, TextEncoder, Vectors
from models.encoder.spec import Side
from models.errors import CareError

NEIGHBOURS, MOST, SEEDS = 5, 1, 5000
THRESHOLDS = {"query": 0.85, "text": 0.78}
EXACT = 50_000
KEPT, NO_TEXT = -1, -2
"""Values in place of the row number of the nearest kept row."""


@dataclass
class Diversify(Step):
    """Keeps `seeds` rows, then those of which at most `most` of the `neighbours` nearest kept ones score above the
    threshold. Queries, or texts, are compared; equal ones should be dropped before (dedup).

    `state` is a folder for the vectors of kept rows and the nearest one of every dropped row.
    """

    encoder: TextEncoder
    state: Path
    by: Literal["query", "text"] = "text"
    threshold: float | None = None
    neighbours: int = NEIGHBOURS
    most: int = MOST
    seeds: int = SEEDS
    exact: int = EXACT

    name = "diversify"
    block = 256

    def __post_init__(self) -> None:
        if min(self.most, self.seeds, self.exact) < 0:
            raise CareError("--most, --seeds and --exact cannot be below 0")

    def parameters(self) -> dict[str, Any]:
        own = {"by": self.by, "neighbours": self.neighbours, "most": self.most, "seeds": self.seeds}
        return {**own, "threshold": self._threshold, "exact": self.exact, "encoder": self.encoder.fingerprint}

    @property
    def _threshold(self) -> float:
        return THRESHOLDS[self.by] if self.threshold is None else self.threshold

    @cached_property
    def _vectors(self) -> RecordFile:
        return RecordFile(self.state / "kept.f16", self.encoder.opened.spec.dim, STORED)

    @cached_property
    def _nearest(self) -> RecordFile:
        return RecordFile(self.state / "nearest.i32", 1, np.dtype("<i4"))

    @cached_property
    def _kept(self) -> GrowingIndex:
        return GrowingIndex(self.encoder.opened.spec.dim, self.exact)

    def resume(self, seen: int, made: Iterator[Row]) -> None:
        self._vectors.cut(sum(1 for _ in made))
        self._nearest.cut(seen)
        known = self._vectors.load()
        for first in range(0, len(known), self.block):
            self._kept.add(known[first : first + self.block].astype(np.float32))

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        for some in in_blocks(rows, self.block):
            texts = [query_of(row) if self.by == "query" else "\n".join(passages_of(row)) for row in some]
            vectors = self.encoder.read(texts, Side.QUERY if self.by == "query" else Side.DOCUMENT)
            nearest = self._compare(vectors, np.array([bool(text) for text in texts]))
            self._vectors.append(vectors[nearest == KEPT])
            self._nearest.append(nearest)
            self._kept.add(vectors[nearest == KEPT])
            reasons = {KEPT: "", NO_TEXT: f"no {self.by} to compare by"}
            like = f"like more than {self.most} kept rows"
            for row, place in zip(some, nearest.tolist(), strict=True):
                reason = reasons.get(place, like)
                yield Outcome(dropped=reason) if reason else Outcome([row])

    def _compare(self, vectors: Vectors, there: NDArray[np.bool_]) -> NDArray[np.int32]:
        """For each row of a block KEPT, NO_TEXT, or the place of the kept row that is nearest to it."""
        known, threshold = len(self._kept), self._threshold
        scores, places = self._kept.nearest(vectors, self.neighbours)
        within, before = vectors @ vectors.T, (scores > threshold).sum(1)
        nearest, kept = np.full(len(vectors), NO_TEXT, np.int32), list[int]()
        for at in np.flatnonzero(there).tolist():
            like = within[at, kept]
            near = min(int(before[at] + (like > threshold).sum()), self.neighbours)
            if known + len(kept) < self.seeds or near <= self.most:
                nearest[at] = KEPT
                kept.append(at)
            elif len(kept) and like.max() > scores[at, 0]:
                nearest[at] = known + int(like.argmax())
            else:
                nearest[at] = places[at, 0]
        return nearest

    def facts(self, tally: Tally) -> dict[str, Any]:
        """Counts for each kept row itself and the dropped rows that it is nearest to."""
        nearest = self._nearest.load()[:, 0]
        sizes = 1 + np.bincount(nearest[nearest >= 0], minlength=len(self._kept))
        edges = [1, 2, 3, 5, 9, 17, 65, 257]
        counts = {
            f"{low}" if high == low + 1 else f"{low} and more" if high is None else f"{low} to {high - 1}": int(
                ((sizes >= low) & (sizes < (high or np.inf))).sum()
            )
            for low, high in zip(edges, [*edges[1:], None], strict=True)
        }
        largest = np.sort(sizes)[::-1][:10].tolist()
        return {"clusters": {"kept": len(sizes), "by_size": counts, "largest": largest, "exact": self._kept.is_exact}}

    def finish(self, out: Path) -> None:
        shutil.rmtree(self.state, ignore_errors=True)
