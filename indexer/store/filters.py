"""Filters on a document's metadata, as plain values; `metadata` evaluates them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from models.errors import CareError

LARGEST = 2**63
NUMBER, TEXT = "a number", "text"

Value = str | bool | int | float | Sequence[str] | None
Metadata = Mapping[str, Value]
SplitNumber = tuple[float, int]
"""A number as the nearest float64 and what that leaves over of a whole number: the pairs compare as the numbers do."""


class BadValue(CareError):
    """A metadata value that no filter column can hold."""


def as_value(name: str, value: object) -> Value:
    """A metadata value as the store takes it; dates become ISO texts, which sort as dates do."""
    if isinstance(value, date):  # a datetime is a date too
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # Parquet files made from data frames spell a missing number this way
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise BadValue(f"metadata field {name} is a whole number of more than 64 bits; give it as text")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise BadValue(f"metadata field {name} is neither text, number, true/false nor a list of texts")


def split_number(number: int | float) -> SplitNumber:
    try:
        nearest = float(number)
    except OverflowError:  # a whole number of a filter that is larger than anything stored
        return (math.inf if number > 0 else -math.inf), 0
    return nearest, number - int(nearest) if isinstance(number, int) else 0


def read_number(text: str) -> int | float | None:
    """The number that a text spells, whole numbers exactly; None if it spells none."""
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return None


def kind_of(value: Value) -> str:
    """In words: one field has one kind in all documents."""
    return NUMBER if isinstance(value, int | float) and not isinstance(value, bool) else TEXT


def has_value(value: Value) -> bool:
    """Whether a column has to hold it: neither nothing nor an empty list."""
    return value is not None and value != []


def spell(value: object) -> str:
    """A text as keyword columns spell it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise TypeError(f"a text column was given {value!r}")
    return value


def spell_all(value: Value) -> list[str]:
    """The texts of a value: none, one, or those of a list."""
    if value is None:
        return []
    return [spell(item) for item in value] if isinstance(value, list | tuple) else [spell(value)]


FilterValue = str | bool | int | float


@dataclass(frozen=True, slots=True)
class Equal:
    """The field has this value (for a list: holds it)."""

    field: str
    value: FilterValue

    @property
    def wanted(self) -> tuple[FilterValue, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The field has one of these values (for a list: holds one of them)."""

    field: str
    values: tuple[FilterValue, ...]

    @property
    def wanted(self) -> tuple[FilterValue, ...]:
        return self.values


@dataclass(frozen=True, slots=True)
class Range:
    """The field's value lies between the bounds that are given; texts compare by code point, as ISO dates do."""

    field: str
    gte: FilterValue | None = None
    gt: FilterValue | None = None
    lte: FilterValue | None = None
    lt: FilterValue | None = None


@dataclass(frozen=True, slots=True)
class Not:
    """Negates a filter: a document without the field satisfies it, too."""

    excluded: Filter


@dataclass(frozen=True, slots=True)
class Either:
    """Holds if at least one of the filters, of which there is at least one, holds."""

    alternatives: tuple[Filter, ...]


Condition = Equal | AnyOf | Range
"""A filter on one field."""
Filter = Condition | Not | Either


def restrict(filters: Iterable[Filter], has_field: Callable[[str], bool]) -> tuple[Filter, ...]:
    """Replaces each condition on a field that documents lack by an empty AnyOf, which no document satisfies."""
    return tuple(_restrict(each, has_field) for each in filters)


def _restrict(given: Filter, has_field: Callable[[str], bool]) -> Filter:
    if isinstance(given, Not):
        return Not(_restrict(given.excluded, has_field))
    if isinstance(given, Either):
        return Either(restrict(given.alternatives, has_field))
    return given if has_field(given.field) else AnyOf(given.field, ())
