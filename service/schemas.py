"""The shapes of requests and answers. Requests are parsed by these models; answers are described by them in /docs,
while their bytes are put together from what the snapshot stores.

Lists are read up to their first fault (`fail_fast`): an error for each of a million items would take many seconds, in
which nobody else is answered, to tell of one."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    StringConstraints,
    model_validator,
)

from indexer.store.filters import LARGEST, AnyOf, Either, Equal, Filter, Not, Range
from models.fusion import Fusion
from service.engine.protocol import Mode

MAX_FIELDS = 16
MAX_FILTERS = 32
MAX_FILTER_VALUES = 1000
MAX_PASSAGES = 20
MAX_TIMEOUT_MS = 600_000
MAX_HYDE_DOCUMENTS = 8
DEFAULT_HYDE_DOCUMENTS = 3


def _of_64_bits(value: object) -> object:
    """The value, refused if it is a whole number that no column can hold."""
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise ValueError("a whole number of more than 64 bits matches nothing; documents hold such numbers as text")
    return value


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
FilterText = Annotated[StrictStr, StringConstraints(max_length=1000)]
FieldName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Words = Annotated[str, StringConstraints(max_length=1000)]
Value = Annotated[FilterText | StrictBool | StrictInt | Number, BeforeValidator(_of_64_bits)]
Values = Annotated[tuple[Value, ...], Field(min_length=1, max_length=MAX_FILTER_VALUES, fail_fast=True)]
Queries = Annotated[list[str], Field(fail_fast=True)]


class Part(StrEnum):
    """What a hit may show beside its id and score."""

    TITLE = "title"
    SNIPPET = "snippet"
    METADATA = "metadata"
    TEXT = "text"
    HEADLINE = "headline"


DEFAULT_PARTS = (Part.TITLE, Part.SNIPPET, Part.METADATA)


Clauses = Annotated[tuple["FilterClause", ...], Field(max_length=MAX_FILTERS, fail_fast=True)]


class FilterClause(BaseModel):
    """A condition on one metadata field (`eq`, or `in`, or bounds: `gte`, `gt`, `lte`, `lt`), or `not`, or `any`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    field: FieldName | None = None
    excluded: FilterClause | None = Field(
        default=None, alias="not", description="A filter that must not hold; a missing field satisfies this."
    )
    alternatives: Clauses | None = Field(
        default=None, alias="any", min_length=1, description="Filters of which at least one must hold."
    )
    eq: Value | None = None
    any_of: Values | None = Field(default=None, alias="in")
    gte: Value | None = None
    gt: Value | None = None
    lte: Value | None = None
    lt: Value | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        bounds = any(bound is not None for bound in (self.gte, self.gt, self.lte, self.lt))
        conditions = (self.eq is not None) + (self.any_of is not None) + bounds
        if (self.excluded is not None) + (self.alternatives is not None) + conditions != 1:
            raise ValueError("give exactly one of: eq, in, bounds (gte, gt, lte, lt), not, any")
        if conditions != (self.field is not None):
            raise ValueError("not and any take no field" if self.field else "a condition needs a field")
        return self

    @property
    def values(self) -> int:
        """How many values it compares with, those of the clauses in it not counted."""
        bounds = (self.eq, self.gte, self.gt, self.lte, self.lt)
        return len(self.any_of or ()) + sum(bound is not None for bound in bounds)

    def walk(self) -> Iterator[FilterClause]:
        """This clause and all clauses in it."""
        yield self
        for part in (self.alternatives or ()) if self.excluded is None else (self.excluded,):
            yield from part.walk()

    def to_filter(self) -> Filter:
        if self.excluded is not None:
            return Not(self.excluded.to_filter())
        if self.alternatives is not None:
            return Either(tuple(each.to_filter() for each in self.alternatives))
        field = self.field or ""
        if self.eq is not None:
            return Equal(field, _plain(self.eq))
        if self.any_of is not None:
            return AnyOf(field, tuple(_plain(value) for value in self.any_of))
        bounds = {name: getattr(self, name) for name in ("gte", "gt", "lte", "lt")}
        return Range(field, **{name: None if bound is None else _plain(bound) for name, bound in bounds.items()})


def _plain(value: str | bool | int | float) -> str | int | float:
    """True and false as the texts that the store spells them as: in Python True equals 1, and filters are compared."""
    return str(value).lower() if isinstance(value, bool) else value


def _bound_clauses(filters: tuple[FilterClause, ...]) -> tuple[FilterClause, ...]:
    if (count := sum(1 for each in filters for _ in each.walk())) > MAX_FILTERS:
        raise ValueError(f"must hold at most {MAX_FILTERS} clauses, nested ones included, got {count}")
    return filters


class HydeOptions(BaseModel):
    """How many documents to imagine for a query."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: Annotated[int, Field(ge=1, le=MAX_HYDE_DOCUMENTS)] = DEFAULT_HYDE_DOCUMENTS


class SearchRequest(BaseModel):
    """One query or several, and how to answer them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: str | Queries = Field(description="A text, or a list of texts that are answered in their order.")
    top_k: int = Field(default=10, description="How many documents per query.")
    offset: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="How many of the best documents to skip. Pages of equal requests, given an offset from 0 on, are "
        "slices of one ranking; offset + top_k is bounded as top_k is.",
    )
    mode: Mode | None = Field(default=None, description="Which scores rank; the service's default where left out.")
    fields: Annotated[tuple[Part, ...], Field(max_length=MAX_FIELDS, fail_fast=True)] = Field(
        default=DEFAULT_PARTS, description="What a hit shows beside id and score."
    )
    filters: Annotated[Clauses, AfterValidator(_bound_clauses)] = Field(
        default=(), description="Filters on metadata; a document must satisfy all."
    )
    facets: Annotated[tuple[FieldName, ...], Field(max_length=MAX_FIELDS, fail_fast=True)] = Field(
        default=(),
        description="Metadata fields whose values are counted among the best documents of each query, as many as the "
        "largest top_k, those below min_score left out.",
    )
    fusion: Fusion = Field(default=Fusion.SCORES, description="How hybrid mode makes one ranking of two.")
    weight: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Share of the dense score in fusion by scores; a tuned default where left out."
    )
    min_score: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        default=None, description="Leaves out hits of a lower score."
    )
    passages: Annotated[int, Field(ge=0, le=MAX_PASSAGES)] = Field(
        default=0, description="How many of its matching passages a hit shows at most."
    )
    explain: bool = Field(default=False, description="Whether a hit shows its rank and score on either side.")
    hyde: bool | HydeOptions = Field(
        default=False, description="Search with documents that a language model imagines, too; true means three."
    )
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)] | None = Field(
        default=None, description="Longest wait for the answer (504 beyond it)."
    )
    bulk: bool = Field(
        default=False, description="Whether other requests may go first; large requests always let them."
    )
    cache: bool = Field(default=True, description="Whether the answer may come from a cache.")

    @property
    def queries(self) -> list[str]:
        return [self.query] if isinstance(self.query, str) else self.query

    @property
    def hyde_documents(self) -> int:
        """Documents to imagine per query; 0 for a plain search."""
        if isinstance(self.hyde, HydeOptions):
            return self.hyde.documents
        return DEFAULT_HYDE_DOCUMENTS if self.hyde else 0


class PassageHit(BaseModel):
    """A passage of a document that was found."""

    span: tuple[int, int] = Field(description="First and last-plus-one character in the document's text.")
    score: float = Field(description="The passage's own, in the ranking of passages.")
    snippet: str | None = None
    highlights: list[tuple[int, int]] | None = None
    text: str | None = None


class Placing(BaseModel):
    """Where a document stands in the ranking of one side."""

    rank: int
    score: float


class Explanation(BaseModel):
    """How a hit came to its score; null for a side that did not find it, or did not look."""

    dense: Placing | None
    lexical: Placing | None
    weight: float | None = Field(description="The dense side's share in this query's fusion by scores.")


class Hit(BaseModel):
    """A document that was found."""

    id: str
    score: float
    title: str | None = None
    metadata: dict[str, Any] | None = None
    snippet: str | None = Field(default=None, description="The passage around the words of the query that it holds.")
    highlights: list[tuple[int, int]] | None = Field(default=None, description="Characters of the snippet that match.")
    text: str | None = None
    headline: str | None = Field(default=None, description="The title, or the beginning of the text if it has none.")
    passages: list[PassageHit] | None = None
    explain: Explanation | None = None


class HydeStatus(StrEnum):
    """Whether imagined documents took part in a search, or it is a plain one because none came in time."""

    USED = "used"
    FAILED = "failed"


class Result(BaseModel):
    """The ranking of one query."""

    hits: list[Hit]
    truncated: bool = Field(description="Whether the query was longer than the encoder reads, and was cut.")
    facets: dict[str, dict[str, int]] | None = Field(
        default=None, description="Documents per value, by field, the most frequent values first."
    )
    hyde: HydeStatus | None = None


class StageTimings(BaseModel):
    """Milliseconds per stage; `queue` includes the way to the engine and back."""

    tokenize: float
    queue: float
    encode: float
    search: float
    fetch: float
    total: float


class SearchAnswer(BaseModel):
    """One result per query, in the order asked, all from one snapshot."""

    results: list[Result]
    snapshot: str
    timings_ms: StageTimings


class StreamEnd(BaseModel):
    """The last line of a streamed answer."""

    snapshot: str
    timings_ms: StageTimings


class EncoderFacts(BaseModel):
    """The encoder that reads the queries."""

    architecture: str
    dim: int
    max_length: int
    space: str
    variant: str
    fingerprint: str


class FreshFacts(BaseModel):
    """What was posted and deleted since the snapshot was built."""

    position: int = Field(description="How far the log was read.")
    documents: int = Field(description="Posted documents that are searched beside the snapshot.")
    changes: int = Field(description="Documents posted or deleted, repeats counted.")
    passages: int = Field(description="Passages posted, repeats counted.")
    limit: int = Field(description="How many passages are taken before a re-index.")


class NumberRange(BaseModel):
    """All values of a field lie between these; documents that were deleted or replaced since the build count, too."""

    min: int | float
    max: int | float


class PageWords(BaseModel):
    """What the search page says about a collection, in one language; what is left out has a general default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: Words = Field(default="", description="The headline of the start page.")
    intro: Words = Field(default="", description="The sentence below it.")
    hint: Words = Field(default="", description="The text in the empty search box.")
    questions: Annotated[list[Words], Field(max_length=MAX_FIELDS)] = Field(
        default=[], description="Questions to try; samples of the documents are offered if there are none."
    )
    disclaimer: Words = Field(default="", description="The sentence at the foot of the page.")
    fields: dict[str, Words] = Field(default={}, description="Names of metadata fields.")
    values: dict[str, dict[str, Words]] = Field(default={}, description="Names of their values, by field.")


class CollectionAnswer(BaseModel):
    """What is served: enough for a page to offer filters."""

    snapshot: str
    created: str
    documents: int
    passages: int
    fresh: FreshFacts
    encoder: EncoderFacts
    modes: list[Mode]
    default_mode: Mode
    max_top_k: int
    max_queries: int
    fields: list[str] = Field(description="Metadata fields that a filter may name.")
    facets: dict[str, dict[str, int]] = Field(description="Documents per value, for fields of few values.")
    numbers: dict[str, NumberRange] = Field(description="Fields of numbers.")
    samples: list[str] = Field(description="Titles of a few documents.")
    page: dict[str, PageWords] = Field(description="What the collection's page.json says, by language.")


class SwapAnswer(BaseModel):
    """What is served after an administrator's request, and whether that is new."""

    snapshot: str
    changed: bool


class VersionsAnswer(BaseModel):
    """The versions of the collection, oldest first."""

    versions: list[str]
    current: str | None = Field(description="The version that the pointer names.")
    serving: str | None = Field(description="The version that this process answers from.")
    failed: str | None = Field(default=None, description="Why the pointer's version is not served, where it is not.")


class StatusAnswer(BaseModel):
    """A word on the state of the process."""

    status: str
    snapshot: str | None = None


class ErrorFacts(BaseModel):
    """What went wrong, for a program (`code`) and for a person (`message`)."""

    code: str
    message: str
    field: str | None = None
    request_id: str


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorFacts
