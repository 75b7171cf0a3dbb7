"""Metadata of all documents: maps filters to a boolean array over document rows, and lists facets and ranges."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import orjson

from indexer.errors import BadFilter, BadSnapshot
from indexer.store import filters as f
from indexer.store.arrays import Mask, Rows
from indexer.store.columns import Column, FieldKind, KeywordColumn, NumberColumn
from indexer.store.filters import Condition, Filter, Range, Value
from models.errors import did_you_mean

FIELDS_FILE = "metadata.json"
FACET_VALUES = 50
MEMORISED_PARTS = 32


class MetadataIndex:
    """The filter columns of a snapshot, by field name."""

    def __init__(self, columns: dict[str, Column], documents: int) -> None:
        self._columns = columns
        self._documents = documents
        self._parts: dict[tuple[Filter, ...], MetadataIndex] = {}

    @classmethod
    def open(cls, folder: Path, documents: int) -> MetadataIndex:
        try:
            fields = [
                (str(each["name"]), FieldKind(each["kind"]))
                for each in orjson.loads((folder / FIELDS_FILE).read_bytes())
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadSnapshot(f"{folder / FIELDS_FILE} is unreadable ({error}); build the snapshot again") from error
        columns: dict[str, Column] = {}
        for position, (name, kind) in enumerate(fields):
            stem = f"metadata.{position}"
            if kind is FieldKind.NUMBER:
                columns[name] = NumberColumn.open(folder, stem, documents)
            else:
                columns[name] = KeywordColumn.open(folder, stem, documents, lists=kind is FieldKind.KEYWORDS)
        return cls(columns, documents)

    @classmethod
    def of(cls, rows: Sequence[f.Metadata]) -> MetadataIndex:
        """Returns the columns of a few documents, in memory. Of a field with mixed kinds the first one counts."""
        values: dict[str, dict[int, Value]] = {}
        for row, metadata in enumerate(rows):
            for name, value in metadata.items():
                if f.has_value(value):
                    column = values.setdefault(name, {})
                    if not column or f.kind_of(value) == f.kind_of(next(iter(column.values()))):
                        column[row] = value
        columns: dict[str, Column] = {}
        for name, found in sorted(values.items()):
            if f.kind_of(next(iter(found.values()))) == f.NUMBER:
                numbers = {row: value for row, value in found.items() if isinstance(value, int | float)}
                columns[name] = NumberColumn.of(len(rows), numbers)
            else:
                columns[name] = KeywordColumn.of([f.spell_all(found.get(row)) for row in range(len(rows))])
        return cls(columns, len(rows))

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each field, NUMBER or TEXT."""
        return {n: f.NUMBER if isinstance(column, NumberColumn) else f.TEXT for n, column in self._columns.items()}

    def kinds_without(self, rows: Rows) -> dict[str, str]:
        """Returns the kind of each field that some document has beside these."""
        if not len(rows):
            return self.kinds
        return {name: kind for name, kind in self.kinds.items() if self._counts[name] > self._columns[name].count(rows)}

    @cached_property
    def _counts(self) -> dict[str, int]:
        return {name: column.count() for name, column in self._columns.items()}

    @property
    def fields(self) -> list[str]:
        return list(self._columns)

    @property
    def columns(self) -> list[Column]:
        """In the order of `fields`."""
        return list(self._columns.values())

    def select(self, filters: Sequence[Filter]) -> Mask:
        """Returns which documents satisfy every filter, (documents,)."""
        mask = np.ones(self._documents, dtype=np.bool_)
        for each in filters:
            mask &= self._match(each)
        return mask

    def part(self, filters: tuple[Filter, ...]) -> MetadataIndex:
        """Returns the columns of the documents that satisfy every filter, without fields and values of others."""
        if (known := self._parts.get(filters)) is not None:
            return known
        rows = self.select(filters)
        columns = {name: some for name, column in self._columns.items() if (some := column.part(rows)) is not None}
        part = MetadataIndex(columns, int(np.count_nonzero(rows)))
        # No lru_cache, which would keep a reference to this index: a replaced snapshot must be freed at once.
        self._parts = dict([*self._parts.items()][1 - MEMORISED_PARTS :]) | {filters: part}
        return part

    def facets(self) -> dict[str, dict[str, int]]:
        """For each field of few distinct texts: how many documents have each, the most frequent first."""
        keywords = ((name, column) for name, column in self._columns.items() if isinstance(column, KeywordColumn))
        return {name: column.counts() for name, column in keywords if len(column) <= FACET_VALUES}

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """For each field of numbers: the least and the greatest."""
        numbers = {name: column.limits() for name, column in self._columns.items() if isinstance(column, NumberColumn)}
        return {name: limits for name, limits in numbers.items() if limits is not None}

    def column(self, condition: Condition) -> Column:
        """Returns the column that a condition is about; raises BadFilter if there is none, or nothing to compare."""
        field = condition.field
        if field not in self._columns:
            raise no_such_field(field, self._columns, self.example())
        if isinstance(condition, Range) and condition == Range(field):
            raise BadFilter(field, f"filter on {field}: a range needs at least one of gte, gt, lte, lt")
        return self._columns[field]

    def _match(self, clause: Filter) -> Mask:
        if isinstance(clause, f.Not):
            return ~self._match(clause.excluded)
        if isinstance(clause, f.Either):
            matched: Mask = np.logical_or.reduce([self._match(each) for each in clause.alternatives])
            return matched
        if isinstance(clause, f.AnyOf) and not clause.values:
            return np.zeros(self._documents, np.bool_)
        column = self.column(clause)
        try:
            return column.match(clause)
        except BadFilter as bad:
            raise BadFilter(bad.field, f"{bad}{self.example(bad.field)}") from None

    def example(self, field: str | None = None) -> str:
        """Returns the end of an error message: a filter that this collection accepts, on the field if one is named."""
        for name in [field] if field else self._columns:
            if (value := self._columns[name].example()) is not None:
                return "; for example " + orjson.dumps({"field": name, "eq": value}).decode()
        return ""


def no_such_field(field: str, fields: Collection[str], example: str) -> BadFilter:
    """Returns the error of a filter on a field that is not among the collection's `fields`."""
    problem = f"filter on {field}: the collection has no such field; it has {', '.join(fields) or 'none'}"
    return BadFilter(field, f"{problem}{did_you_mean(field, fields)}{example}")


def admits(filters: Sequence[Filter], *metadata: f.Metadata) -> bool:
    """Returns whether documents with this metadata satisfy every filter; not if a value does not suit its field."""
    alone = MetadataIndex.of(metadata)
    try:
        return bool(alone.select(f.restrict(filters, alone.kinds.__contains__)).all())
    except BadFilter:
        return False
