"""What the service asks of an engine, whatever machine or process it runs on. Knows nothing of HTTP or asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from models.fusion import Fusion
from models.tokenizer import Tokens

if TYPE_CHECKING:
    from indexer.store import Filter
    from service.serving import Serving


class Mode(StrEnum):
    """Which scores rank the documents."""

    DENSE = "dense"
    LEXICAL = "lexical"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer a query: everything but its text. Equal options and text give an equal ranking."""

    mode: Mode
    top_k: int
    filters: tuple[Filter, ...] = ()
    fusion: Fusion = Fusion.SCORES
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One query for the engine. `tokens` follow from the text; lexical mode needs none."""

    query: str
    options: Options
    tokens: Tokens | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Found:
    """The best documents of one query, best first: three arrays of one length.

    `passages` holds the row of the passage that speaks for each document.
    """

    documents: NDArray[np.int64]
    passages: NDArray[np.int64]
    scores: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What one batch spent; every query of the batch shares the object."""

    encode_seconds: float
    search_seconds: float


class Engine(Protocol):
    """Runs one batch at a time; only the batcher's thread calls it."""

    def run(self, serving: Serving, batch: Sequence[Job]) -> tuple[list[Found], BatchTimes]:
        """Answers every job of the batch, in its order, from the given serving."""
        ...
