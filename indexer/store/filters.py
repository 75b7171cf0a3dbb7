"""Filters on a document's metadata, as plain values; `metadata` evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
