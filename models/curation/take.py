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
from models.curation.rows import Row, query_of, read_rows, whole_text
from models.errors import CareError


@dataclass(frozen=True)
class Take(Step):
    """Keeps the rows from `share[0]` up to `share[1]` of each source, in an order that `seed` and the texts give.

    Rows with one query stay together, so that no query of one share is in another. Memory: 8 bytes a query.
    """

    files: Sequence[Path]
    share: tuple[float, float]
    seed: int = 0

    name = "take"

    def __post_init__(self) -> None:
        if not 0 <= self.share[0] < self.share[1] <= 1:
            raise CareError("--share: write FROM TO, two numbers from 0 to 1, as 0 0.9 and 0.9 1")

    def parameters(self) -> dict[str, Any]:
        return {"share": list(self.share), "seed": self.seed}

    @cached_property
    def _orders(self) -> dict[str, NDArray[np.uint64]]:
        """The sorted numbers of each source's queries: where a row stands among them is its place from 0 to 1."""
        found = defaultdict[str, list[int]](list)
        for row in read_rows(self.files):
            if row is not None:
                found[_source(row)].append(self._number(row))
        return {source: np.unique(np.array(numbers, np.uint64)) for source, numbers in found.items()}

    def _number(self, row: Row) -> int:
        text = f"{self.seed} {query_of(row) or whole_text(row)}"
        return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest())

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        for row in rows:
            order = self._orders[_source(row)]
            place = int(np.searchsorted(order, np.uint64(self._number(row)))) / len(order)
            taken = self.share[0] <= place < self.share[1]
            yield Outcome([row]) if taken else Outcome(dropped="in another share")


def _source(row: Row) -> str:
    return str(row.get("source", ""))
