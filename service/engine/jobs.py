"""Types that the service and an engine exchange: jobs, their outcomes, and requests to a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.store.arrays import Rows
from models.encoder.spec import Side
from models.encoder.tokenizer import FlatIds, Tokens
from models.fusion import Fusion, Mode
from models.lexical import Ranking

if TYPE_CHECKING:
    from indexer.store.filters import Filter

Vector = NDArray[np.float32]
Vectors = NDArray[np.float32]
NO_TOKENS = np.empty(0, np.int32)
NO_VECTORS = np.empty((0, 0), np.float32)
NO_ROWS = np.empty((0, 0), np.int64)
QUERY_TOKENS = 32  # of a pair, that take about as long as a query
# Messages for clients, the same for every engine.
DATABASE_AWAY = "the vector database does not answer; try again when it is back"
ENGINE_FAILED = "the search engine failed on this query; try again"
EXPIRED = "the time for this request is over; allow it more"


class Options(NamedTuple):
    """Search options. Equal options and text give an equal ranking; `evidence` also asks for the passages found."""

    mode: Mode
    top_k: int
    filters: tuple[Filter, ...] = ()
    fusion: Fusion = Fusion.SCORES
    weight: float | None = None
    trust: float = 0.0
    evidence: bool = False


@dataclass(frozen=True, slots=True)
class SearchJob:
    """A query to rank documents for. Jobs that compare equal are computed once.

    `tokens` follow from the text; lexical mode needs none. `vector`, a ready embedding (dim,) float32 as bytes,
    replaces them and need not follow from the text. `keep_vector` asks for the embedding in the outcome.
    """

    query: str
    options: Options
    tokens: Tokens | None = field(default=None, compare=False)
    vector: bytes | None = None
    keep_vector: bool = False

    load: ClassVar[int] = 1

    @property
    def needs_vector(self) -> bool:
        return self.options.mode is not Mode.LEXICAL


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """A text to encode, without a search."""

    text: str
    side: Side
    tokens: Tokens = field(compare=False)

    vector: ClassVar[None] = None
    keep_vector: ClassVar[bool] = True
    needs_vector: ClassVar[bool] = True
    load: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class PairJob:
    """A query and a document, tokenised together, that the reranker scores. `key` holds their tokens as bytes.

    The score comes as a vector of one number. `load` is the number of queries that take about as long.
    """

    key: bytes
    tokens: Tokens = field(compare=False)

    vector: ClassVar[None] = None
    keep_vector: ClassVar[bool] = True
    needs_vector: ClassVar[bool] = True

    @property
    def load(self) -> int:
        return pair_load(len(self.tokens))


def pair_load(tokens: int) -> int:
    return -(-tokens // QUERY_TOKENS)


Job = SearchJob | EncodeJob | PairJob


@dataclass(frozen=True, slots=True)
class Evidence:
    """The passage rows that the dense and the lexical search found, best first."""

    dense: Ranking
    lexical: Ranking


@dataclass(frozen=True, slots=True)
class Reranked:
    """The reranker's score of each document of a ranking, NaN for those without one; the first `depth` should have one.

    Scores are logits.
    """

    scores: NDArray[np.float32]
    depth: int

    @property
    def scored(self) -> int:
        return int((~np.isnan(self.scores)).sum())


@dataclass(frozen=True, slots=True)
class Found:
    """The best documents of one query, best first: three arrays of one length.

    `passages` holds the row of each document's best passage. `evidence` is set if the options ask for it, `reranked`
    after a second stage.
    """

    documents: NDArray[np.int64]
    passages: NDArray[np.int64]
    scores: NDArray[np.float32]
    evidence: Evidence | None = None
    reranked: Reranked | None = None


@dataclass(slots=True)
class BatchTimes:
    """The seconds that one batch took; every job of the batch shares the object."""

    encode_seconds: float = 0.0
    search_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The engine's answer to one job; `found` is that of a SearchJob, `vector` (dim,) is set if the job keeps it."""

    found: Found
    times: BatchTimes
    vector: Vector | None = None


class Status(IntEnum):
    """How a request ended."""

    DONE = 0
    FAILED = 1
    EXPIRED = 2
    UNKNOWN_SERVING = 3
    DATABASE_AWAY = 4


# Not frozen: a frozen object takes five times as long to make, and these are made for every request.
@dataclass(slots=True, eq=False)
class Request:
    """Queries of one serving with equal options: tokens (`ids` one query after the other, `lengths`) or `vectors`.

    `k` rows are wanted for each; 0 wants the embeddings alone. `deadline` is of the monotonic clock. With `pairs` the
    tokens are of pairs, and the reranker's scores are wanted.
    """

    number: int
    handle: int
    k: int
    bulk: bool = False
    keep_vectors: bool = False
    deadline: float = float("inf")
    filters: tuple[Filter, ...] = ()
    ids: FlatIds = field(default_factory=lambda: NO_TOKENS)
    lengths: FlatIds = field(default_factory=lambda: NO_TOKENS)
    vectors: Vectors = field(default_factory=lambda: NO_VECTORS)
    pairs: bool = False

    @property
    def size(self) -> int:
        return len(self.lengths) or len(self.vectors)

    @property
    def load(self) -> int:
        """The number of queries that take about as long."""
        return sum(map(pair_load, self.lengths.tolist())) if self.pairs else self.size


@dataclass(slots=True, eq=False)
class Response:
    """What one request found: `rows` and `scores` (queries, k), and `vectors` (queries, dim) if they were wanted.

    `batch` queries were computed together; `waiting` more waited for the engine at the end.
    """

    number: int
    status: Status
    times: BatchTimes = field(default_factory=BatchTimes)
    batch: int = 0
    waiting: int = 0
    rows: Rows = field(default_factory=lambda: NO_ROWS)
    scores: Vectors = field(default_factory=lambda: NO_VECTORS)
    vectors: Vectors = field(default_factory=lambda: NO_VECTORS)
