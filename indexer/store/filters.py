"""Types of metadata values and filters; `metadata` evaluates the filters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from indexer.errors import BadValue

LARGEST = 2**63
# Fields of a collection that have a filter column: each takes up to four open files in a build and in the service.
MAX_FIELDS = 200
MAX_FIELD_NAME = 200  # characters
NUMBER, TEXT = "a number", "text"

Value = str | bool | int | float | Sequence[str] | None
Metadata = Mapping[str, Value]
SplitNumber = tuple[float, int]
"""A number as the nearest float64 and the rest that rounding an integer left; pairs compare as the numbers do."""
FilterValue = str | bool | int | float


@dataclass(frozen=True, slots=True)
class Equal:
    """The field has this value (a list: contains it)."""

    field: str
    value: FilterValue


@dataclass(frozen=True, slots=True)
class AnyOf:
    """The field has one of these values (a list: contains one of them)."""

    field: str
    values: tuple[FilterValue, ...]


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
    """At least one of the filters holds; there is at least one."""

    alternatives: tuple[Filter, ...]


Condition = Equal | AnyOf | Range
"""A filter on one field."""
Filter = Condition | Not | Either


def restrict(filters: Iterable[Filter], has_field: Callable[[str], bool]) -> tuple[Filter, ...]:
    """Replaces each condition on a field that documents lack by an empty AnyOf, which no document satisfies.

    An empty AnyOf stays as it is, and its field is not looked at.
    """

    def one(clause: Filter) -> Filter:
        if isinstance(clause, Not):
            return Not(one(clause.excluded))
        if isinstance(clause, Either):
            return Either(tuple(map(one, clause.alternatives)))
        is_empty = isinstance(clause, AnyOf) and not clause.values
        return clause if is_empty or has_field(clause.field) else AnyOf(clause.field, ())

    return tuple(map(one, filters))


def conditions_of(filters: Iterable[Filter]) -> Iterator[Condition]:
    """Yields every condition of the filters, nested ones included."""
    for clause in filters:
        if isinstance(clause, Not):
            yield from conditions_of([clause.excluded])
        elif isinstance(clause, Either):
            yield from conditions_of(clause.alternatives)
        else:
            yield clause


def values_of(condition: Condition) -> tuple[FilterValue, ...]:
    """Returns the values that a field is compared with."""
    if isinstance(condition, Range):
        bounds = (condition.gte, condition.gt, condition.lte, condition.lt)
        return tuple(bound for bound in bounds if bound is not None)
    return condition.values if isinstance(condition, AnyOf) else (condition.value,)


def fields_of(filters: Iterable[Filter]) -> set[str]:
    """Returns the fields that the filters name; an empty AnyOf names none."""
    return {each.field for each in conditions_of(filters) if isinstance(each, Range) or values_of(each)}


def require_name(name: str) -> None:
    """Raises BadValue if no filter could name the field."""
    if not 1 <= len(name) <= MAX_FIELD_NAME:
        raise BadValue(f"a metadata field's name has {len(name)} characters; give it 1 to {MAX_FIELD_NAME}")


def suits(filters: Iterable[Filter], kinds: Mapping[str, str]) -> bool:
    """Returns whether every value can be compared with its field's kind: then evaluating the filters never fails."""
    known = (each for each in conditions_of(filters) if each.field in kinds)
    return all(_comparable(value, kinds[each.field]) for each in known for value in values_of(each))


def _comparable(value: FilterValue, kind: str) -> bool:
    return isinstance(value, str | bool) if kind == TEXT else as_number(value) is not None


def as_number(value: FilterValue) -> int | float | None:
    """Returns the value as a number, also from its digits, because a URL holds only text; None if it is not one."""
    number = read_number(value) if isinstance(value, str) else None if isinstance(value, bool) else value
    return number if number == number else None


def as_value(name: str, value: object) -> Value:
    """Converts a metadata value for the store; dates become ISO texts, which sort as dates do. Raises BadValue."""
    if isinstance(value, date):  # a datetime is a date too
        return value.isoformat()
    if isinstance(value, Decimal):  # as databases export numbers to Parquet
        value = read_number(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        raise BadValue(f"metadata field {name} is not a finite number; give null where there is none")
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
    except OverflowError:  # an integer in a filter that is larger than anything stored
        return (math.inf if number > 0 else -math.inf), 0
    return nearest, number - int(nearest) if isinstance(number, int) else 0


def whole_number(stored: SplitNumber) -> int | float:
    """Returns the number that `split_number` took apart; one that float64 holds exactly stays a float."""
    value, rest = stored
    return int(value) + rest if rest else value


def read_number(text: str) -> int | float | None:
    """Parses a number, integers exactly; None if the text is not one."""
    if "_" in text:  # which Python would read past
        return None
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return None


def kind_of(value: Value) -> str:
    """NUMBER or TEXT: one field has one kind in all documents."""
    return NUMBER if isinstance(value, int | float) and not isinstance(value, bool) else TEXT


def has_value(value: Value) -> bool:
    """Returns whether a column stores it: neither None nor an empty list."""
    return value is not None and value != []


def spell(value: object) -> str:
    """Returns a text as keyword columns spell it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise TypeError(f"a text column was given {value!r}")
    return value


def spell_all(value: Value) -> list[str]:
    """Returns the texts of a value: none, one, or those of a list."""
    if value is None:
        return []
    return [spell(item) for item in value] if isinstance(value, list | tuple) else [spell(value)]
