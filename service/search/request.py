"""Parses a search into pydantic models: queries, filters and options, from a JSON body or a query string.

Lists stop at their first error (`fail_fast`): collecting a million errors of one body would block the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Self
from urllib.parse import parse_qsl

import orjson
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
    ValidationError,
    model_validator,
)

from indexer.store.filters import LARGEST, MAX_FIELD_NAME, AnyOf, Either, Equal, Filter, Not, Range
from models.errors import did_you_mean
from models.fusion import Fusion, Mode
from service.errors import SHOWN_NAME, InvalidRequest, invalid_request

MAX_FIELDS = 16
MAX_FILTERS = 32
MAX_FILTER_VALUES = 1000
MAX_PASSAGES = 20
MAX_TIMEOUT_MS = 600_000
MAX_HYDE_DOCUMENTS = 8
DEFAULT_HYDE_DOCUMENTS = 3
MAX_RERANK_DEPTH = 1000
DEFAULT_RERANK_DEPTH = 20
TOO_MANY_CLAUSES = f"must hold at most {MAX_FILTERS} clauses, nested ones included"
# Keys under which a clause holds others, by alias and by name.
NESTING = ("any", "not", "alternatives", "excluded")
SMALL_BYTES = 4096
MAX_BODY_FIELDS = 100
BOUNDS = ("gte", "gt", "lte", "lt")


def _require_64_bits(value: object) -> object:
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise ValueError("a whole number of more than 64 bits matches nothing; documents hold such numbers as text")
    return value


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
FilterText = Annotated[StrictStr, StringConstraints(max_length=1000)]
FieldName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_FIELD_NAME)]
Value = Annotated[FilterText | StrictBool | StrictInt | Number, BeforeValidator(_require_64_bits)]
Values = Annotated[tuple[Value, ...], Field(min_length=1, max_length=MAX_FILTER_VALUES, fail_fast=True)]
Clauses = Annotated[tuple["FilterClause", ...], Field(max_length=MAX_FILTERS, fail_fast=True)]


class Part(StrEnum):
    """What a hit may show beside its id and score."""

    TITLE = "title"
    SNIPPET = "snippet"
    METADATA = "metadata"
    TEXT = "text"
    HEADLINE = "headline"


DEFAULT_PARTS = (Part.TITLE, Part.SNIPPET, Part.METADATA)


class FilterClause(BaseModel):
    """A condition on one metadata field (`eq`, or `in`, or bounds: `gte`, `gt`, `lte`, `lt`), or `not`, or `any`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    field: FieldName | None = None
    excluded: FilterClause | None = Field(
        None, alias="not", description="A filter that must not hold; a missing field satisfies this."
    )
    alternatives: Clauses | None = Field(
        None, alias="any", min_length=1, description="Filters of which at least one must hold."
    )
    eq: Value | None = None
    any_of: Values | None = Field(None, alias="in")
    gte: Value | None = None
    gt: Value | None = None
    lte: Value | None = None
    lt: Value | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        bounds = any(getattr(self, name) is not None for name in BOUNDS)
        conditions = (self.eq is not None) + (self.any_of is not None) + bounds
        if (self.excluded is not None) + (self.alternatives is not None) + conditions != 1:
            raise ValueError("give exactly one of: eq, in, bounds (gte, gt, lte, lt), not, any")
        if conditions != (self.field is not None):
            raise ValueError("not and any take no field" if self.field else "a condition needs a field")
        return self

    @property
    def values(self) -> int:
        """Returns how many values this clause compares with, without nested clauses."""
        return len(self.any_of or ()) + sum(getattr(self, name) is not None for name in ("eq", *BOUNDS))

    def walk(self) -> Iterator[FilterClause]:
        """Yields this clause and all nested ones."""
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
        bounds = {name: getattr(self, name) for name in BOUNDS}
        return Range(field, **{name: None if bound is None else _plain(bound) for name, bound in bounds.items()})


def _plain(value: str | bool | int | float) -> str | int | float:
    """Writes booleans as the store does, as texts: in Python True equals 1, and filters are compared."""
    return str(value).lower() if isinstance(value, bool) else value


def _bound_clauses(filters: tuple[FilterClause, ...]) -> tuple[FilterClause, ...]:
    if sum(1 for each in filters for _ in each.walk()) > MAX_FILTERS:
        raise ValueError(TOO_MANY_CLAUSES)
    return filters


def require_few_parts(body: bytes, most: int) -> None:
    """Counts what a large body holds before it becomes models, which takes up to 75 µs a part: lists, clauses, fields.

    The bodies of most requests are too small to hold much, and are not parsed twice.
    """
    if len(body) <= SMALL_BYTES:
        return
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:  # NaN among others, which pydantic would read
        raise InvalidRequest("body", f"is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        return  # the validation says what is wrong
    if len(parsed) > MAX_BODY_FIELDS:
        raise InvalidRequest("body", f"has {len(parsed)} fields; /docs lists those that are read")
    for name, value in parsed.items():
        if isinstance(value, list) and len(value) > most:
            raise InvalidRequest(name, f"must hold at most {most} elements, got {len(value)}")
    filters = parsed.get("filters")
    waiting, count = list(filters) if isinstance(filters, list) else [], 0
    while waiting:
        if (count := count + 1) > MAX_FILTERS:
            raise InvalidRequest("filters", TOO_MANY_CLAUSES)
        clause = waiting.pop()
        for name in NESTING if isinstance(clause, dict) else ():
            nested = clause.get(name, [])
            waiting += nested if isinstance(nested, list) else [nested]


class HydeOptions(BaseModel):
    """How many documents to imagine for a query."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: Annotated[int, Field(ge=1, le=MAX_HYDE_DOCUMENTS)] = DEFAULT_HYDE_DOCUMENTS


class RerankOptions(BaseModel):
    """How many of the first documents the reranker scores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    depth: Annotated[int, Field(ge=1, le=MAX_RERANK_DEPTH)] = DEFAULT_RERANK_DEPTH


class HydeStatus(StrEnum):
    """Whether imagined documents took part in a search, or none came in time and it is a plain one."""

    USED = "used"
    FAILED = "failed"


class SearchRequest(BaseModel):
    """One query or several, and how to answer them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: str | Annotated[list[str], Field(fail_fast=True)] = Field(
        description="A text, or a list of texts that are answered in their order."
    )
    top_k: int = Field(default=10, description="How many documents per query.")
    offset: int | None = Field(
        default=None,
        ge=0,
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
    weight: float | None = Field(
        default=None, ge=0, le=1, description="Share of the dense score in fusion by scores; default: tuned."
    )
    min_score: float | None = Field(default=None, allow_inf_nan=False, description="Leaves out hits of a lower score.")
    passages: int = Field(default=0, ge=0, le=MAX_PASSAGES, description="Most matching passages that a hit shows.")
    explain: bool = Field(default=False, description="Whether a hit shows its rank and score on either side.")
    hyde: bool | HydeOptions = Field(
        default=False, description="Search with documents that a language model imagines, too; true means three."
    )
    rerank: bool | RerankOptions = Field(
        default=False,
        description="Put the first documents into the order of the service's reranker; true means the first 20. "
        "What is not scored within timeout_ms keeps its place.",
    )
    timeout_ms: int | None = Field(
        default=None, ge=1, le=MAX_TIMEOUT_MS, description="Longest wait for the answer (504 beyond it)."
    )
    bulk: bool = Field(default=False, description="Whether other requests may go first; always if it is large.")
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

    @property
    def rerank_depth(self) -> int:
        """Documents to rerank per query; 0 for none."""
        if isinstance(self.rerank, RerankOptions):
            return self.rerank.depth
        return DEFAULT_RERANK_DEPTH if self.rerank else 0


FROM_QUERY_STRING = {"q": "query", "filter": "filters"}  # parameter → field of the body
PARAMETERS = [
    *FROM_QUERY_STRING,
    *(name for name in SearchRequest.model_fields if name not in FROM_QUERY_STRING.values()),
]
LISTS = ("query", "fields", "filters", "facets")  # parameters that may repeat
OPERATORS = ("eq", "in", "gte", "gt", "lte", "lt")
# The first operator ends the name of the field, which may hold colons itself.
_FILTER = re.compile(f"(.*?):(not\\.)?({'|'.join(OPERATORS)}):(.*)", re.DOTALL)
MAX_PARAMETERS = 1000


def parse_query_string(raw: bytes) -> SearchRequest:
    """Parses `q=…&top_k=…&mode=…&fields=title,text&filter=kind:eq:drug&filter=updated:gte:2025-01-01`."""
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except UnicodeDecodeError:
        raise InvalidRequest("query", "the query string is not UTF-8") from None
    except ValueError:
        raise InvalidRequest("query", f"the query string has more than {MAX_PARAMETERS} parameters") from None
    fields: dict[str, Any] = {}
    for name, value in pairs:
        field = FROM_QUERY_STRING.get(name, name)
        if name not in PARAMETERS:
            there_are = f"; there are {', '.join(PARAMETERS)}"
            raise InvalidRequest(name[:SHOWN_NAME], f"no such parameter{did_you_mean(name, PARAMETERS) or there_are}")
        if field in LISTS:
            single = [_parse_filter(value)] if field == "filters" else [value]
            many = value.split(",") if value else []  # an empty parameter asks for none
            fields.setdefault(field, []).extend(many if field in ("fields", "facets") else single)
        elif field in fields:
            raise InvalidRequest(field, "given more than once")
        else:
            fields[field] = value
    if not (queries := fields.get("query", [])):
        raise InvalidRequest("query", "give a text as q=…")
    try:
        return SearchRequest.model_validate(fields | ({"query": queries[0]} if len(queries) == 1 else {}))
    except ValidationError as error:
        raise invalid_request(error, SearchRequest) from None


def _parse_filter(text: str) -> dict[str, Any]:
    """Parses `field:operator:value` or `field:not.operator:value`; commas separate the values of `in`."""
    parts = _FILTER.fullmatch(text)
    if parts is None:
        form = f"field:operator:value with an operator of {', '.join(OPERATORS)}"
        raise InvalidRequest("filters", f"must read {form}; for example filter=kind:eq:drug")
    name, negated, operator, value = parts.groups()
    clause = {"field": name, operator: value.split(",") if operator == "in" else value}
    return {"not": clause} if negated else clause
