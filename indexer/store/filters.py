"""What a request may ask of a document's metadata. Values only; `metadata` answers them."""

from __future__ import annotations

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


Filter = Equal | AnyOf | Range
