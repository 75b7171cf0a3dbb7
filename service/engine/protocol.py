"""What the service asks of an engine, whatever machine or process it runs on. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from models.fusion import Fusion
from models.lexical import Ranking
from models.spec import Side
from models.tokenizer import Tokens

if TYPE_CHECKING:
    from indexer.store.filters import Filter
    from service.serving import Serving

Vector = NDArray[np.float32]
OnBatch = Callable[[int, float, int], None]
"""Hears the size and the seconds of a batch that was computed, and how many queries waited by then."""


class Mode(StrEnum):
    """Which scores rank the documents."""

    DENSE = "dense"
    LEXICAL = "lexical"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer a query: everything but its text. Equal options and text give an equal ranking.

    `evidence` asks for the passages behind the ranking too.
    """

    mode: Mode
    top_k: int
    filters: tuple[Filter, ...] = ()
    fusion: Fusion = Fusion.SCORES
    weight: float | None = None
    evidence: bool = False


@dataclass(frozen=True, slots=True)
class SearchJob:
    """A query that wants a ranking. Jobs that compare equal are computed once.

    `tokens` follow from the text; lexical mode needs none. `vector` is a ready embedding, (dim,) float32 as bytes: it
    takes the tokens' place, and needs not follow from the text. `keep_vector` asks for the embedding back.
    """

    query: str
    options: Options
    tokens: Tokens | None = field(default=None, compare=False)
    vector: bytes | None = None
    keep_vector: bool = False

    @property
    def needs_vector(self) -> bool:
        """Whether an embedding takes part in the answer."""
        return self.options.mode is not Mode.LEXICAL

    @property
    def wants_vector(self) -> bool:
        """Whether the embedding is part of the answer."""
        return self.keep_vector


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """A text that wants its embedding and nothing else."""

    text: str
    side: Side
    tokens: Tokens = field(compare=False)

    @property
    def needs_vector(self) -> bool:
        return True

    @property
    def wants_vector(self) -> bool:
        return True


Job = SearchJob | EncodeJob


@dataclass(frozen=True, slots=True)
class Evidence:
    """The passage rows that each side found, best first: what the ranking of documents was made of."""

    dense: Ranking
    lexical: Ranking


@dataclass(frozen=True, slots=True)
class Found:
    """The best documents of one query, best first: three arrays of one length.

    `passages` holds the row of the passage that speaks for each document. `evidence` is there where the options ask.
    """

    documents: NDArray[np.int64]
    passages: NDArray[np.int64]
    scores: NDArray[np.float32]
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What one batch spent; every query of the batch shares the object."""

    encode_seconds: float
    search_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The engine's answer to one job.

    `found` is empty for a job that only encodes. `vector` (dim,) is there for such a job and where it was asked for.
    """

    found: Found
    times: BatchTimes
    vector: Vector | None = None


class Engine(Protocol):
    """Runs one batch at a time; only the batcher's thread calls it."""

    def run(self, serving: Serving, batch: Sequence[Job]) -> list[Outcome]:
        """Answers every job of the batch, in its order, from the given serving."""
        ...


class Dispatcher(Protocol):
    """Where requests hand in their jobs; only the event loop calls it."""

    def submit(
        self,
        serving: Serving,
        jobs: Sequence[Job],
        *,
        timeout_seconds: float | None = None,
        bulk: bool | None = None,
        probe: bool = False,
    ) -> list[asyncio.Future[Outcome]]:
        """Takes all jobs or none; one future per job, in order.

        A future fails with DeadlineExceeded once `timeout_seconds` have passed. `bulk` jobs run where online ones leave
        room; unless told, a crowd of jobs is bulk. A probe is taken even under overload, and goes first. Raises
        Overloaded, ShuttingDown, or EngineAway.
        """
        ...

    def require_room(self, serving: Serving, jobs: Sequence[Job], *, bulk: bool | None = None) -> None:
        """Raises Overloaded if `submit` would refuse these jobs now. Called before their texts are tokenised."""
        ...

    def __len__(self) -> int:
        """Jobs that wait, those in the engine not counted."""
        ...
