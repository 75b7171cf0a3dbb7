"""Takes a share of the rows, the same in every run and even over their sources: parts for training and validation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.curation.frame import Outcome, Step
from models.curation.rows import Row, query_of, read_sourced, whole_text
from models.errors import CareError


@dataclass(frozen=True)
class Take(Step):
    """Keeps the rows from `share[0]` up to `share[1]` of each source, in an order that `seed` and the texts give.

    Rows with one query stay together, whatever their sources, so that no query of one share is in another. Memory: 16
    bytes a query.
    """

    files: Sequence[Path]
    share: tuple[float, float]
    seed: int = 0

    name = "take"
    version = 2

    def __post_init__(self) -> None:
        if not 0 <= self.share[0] < self.share[1] <= 1:
            raise CareError("--share: write FROM TO, two numbers from 0 to 1, as 0 0.9 and 0.9 1")

    def parameters(self) -> dict[str, Any]:
        return {"share": list(self.share), "seed": self.seed}

    @cached_property
    def _places(self) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
        """The sorted numbers of all queries, and the place of each, from 0 to 1, among those of its source.

        A query of several sources counts for the first by name alone.
        """
        found = defaultdict[str, list[int]](list)
        for row in read_sourced(self.files):
            if row is not None:
                found[row["source"]].append(self._number(row))
        parts = [np.unique(np.array(found[source], np.uint64)) for source in sorted(found)]
        numbers, firsts = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]), return_index=True)
        homes = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[firsts]
        sizes = np.bincount(homes)
        ranks = np.arange(len(numbers)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        places = np.empty(len(numbers))
        places[np.argsort(homes, kind="stable")] = ranks / np.repeat(sizes, sizes)
        return numbers, places

    def _number(self, row: Row) -> int:
        text = f"{self.seed} {query_of(row) or whole_text(row)}"
        return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())

    def read(self, files: Sequence[Path]) -> Iterator[Row | None]:
        return read_sourced(files)

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        numbers, places = self._places
        for row in rows:
            place = places[np.searchsorted(numbers, np.uint64(self._number(row)))]
            taken = self.share[0] <= place < self.share[1]
            yield Outcome([row]) if taken else Outcome(dropped="in another share")
