"""The metadata of all documents as filter columns: conditions in, a boolean array over document rows out.

Files: `metadata.json` (the fields in order: name and kind) and, for the field at position i, `metadata.<i>.*`;
`metadata_writer` writes them. What a hit shows of its metadata is not read from here but from its document.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import numpy as np
import orjson

from indexer.store.columns import Column, KeywordColumn, Mask, NumberColumn
from indexer.store.documents import Metadata, Value
from indexer.store.errors import BadFilter, BadSnapshot
from indexer.store.filters import AnyOf, Condition, Either, Filter, Not, Range
from indexer.store.values import NUMBER, TEXT, has_value, kind_of, spell_all
from models.errors import did_you_mean

FIELDS_FILE = "metadata.json"
FACET_VALUES = 50


class FieldKind(StrEnum):
    """How a field is stored: texts, lists of texts, or numbers. True and false are the texts "true" and "false"."""

    KEYWORD = "keyword"
    KEYWORDS = "keywords"
    NUMBER = "number"


class MetadataIndex:
    """The filter columns of a snapshot, by field name."""

    def __init__(self, columns: dict[str, Column], documents: int) -> None:
        self._columns = columns
        self._documents = documents

    @classmethod
    def open(cls, folder: Path, documents: int) -> MetadataIndex:
        try:
            fields = [(str(f["name"]), FieldKind(f["kind"])) for f in orjson.loads((folder / FIELDS_FILE).read_bytes())]
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
    def of(cls, rows: Sequence[Metadata]) -> MetadataIndex:
        """The columns of a few documents, in memory. Of a field with mixed kinds the first one counts."""
        values: dict[str, dict[int, Value]] = {}
        for row, metadata in enumerate(rows):
            for name, value in metadata.items():
                if has_value(value):
                    column = values.setdefault(name, {})
                    if not column or kind_of(value) == kind_of(next(iter(column.values()))):
                        column[row] = value
        return cls({name: _column_of(column, len(rows)) for name, column in sorted(values.items())}, len(rows))

    @property
    def kinds(self) -> dict[str, str]:
        """What each field holds, in the words of `values.kind_of`."""
        return {name: NUMBER if isinstance(column, NumberColumn) else TEXT for name, column in self._columns.items()}

    @property
    def fields(self) -> list[str]:
        return list(self._columns)

    @property
    def columns(self) -> list[Column]:
        """In the order of `fields`."""
        return list(self._columns.values())

    def select(self, filters: Sequence[Filter]) -> Mask:
        """Which documents satisfy every filter, (documents,)."""
        mask = np.ones(self._documents, dtype=np.bool_)
        for each in filters:
            mask &= self._match(each)
        return mask

    def position(self, field: str) -> int:
        """Which of `columns` a field is."""
        return self.fields.index(field)

    def facets(self) -> dict[str, dict[str, int]]:
        """For each field of few distinct texts: how many documents have each, the most frequent first."""
        return {
            name: column.counts()
            for name, column in self._columns.items()
            if isinstance(column, KeywordColumn) and len(column) <= FACET_VALUES
        }

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """For each field of numbers: the least and the greatest."""
        numbers = {name: column.limits() for name, column in self._columns.items() if isinstance(column, NumberColumn)}
        return {name: limits for name, limits in numbers.items() if limits is not None}

    def column(self, condition: Condition) -> Column:
        """The column that a condition is about; raises BadFilter if there is none, or nothing to compare."""
        field = condition.field
        if field not in self._columns:
            known = ", ".join(self._columns) or "none"
            said = f"filter on {field}: the collection has no such field; it has {known}"
            raise BadFilter(field, f"{said}{did_you_mean(field, self._columns)}{self._example()}")
        if isinstance(condition, Range) and condition == Range(field):
            raise BadFilter(field, f"filter on {field}: a range needs at least one of gte, gt, lte, lt")
        return self._columns[field]

    def _match(self, given: Filter) -> Mask:
        if isinstance(given, Not):
            return ~self._match(given.excluded)
        if isinstance(given, Either):
            matched: Mask = np.logical_or.reduce([self._match(each) for each in given.alternatives])
            return matched
        if isinstance(given, AnyOf) and not given.values:
            return np.zeros(self._documents, np.bool_)
        column = self.column(given)
        try:
            return column.match(given)
        except BadFilter as bad:
            raise BadFilter(bad.field, f"{bad}{self._example(bad.field)}") from None

    def _example(self, field: str | None = None) -> str:
        """The end of an error message: a filter that this collection accepts, on the field if one is named."""
        for name in [field] if field else self._columns:
            if (value := self._columns[name].example()) is not None:
                return "; for example " + orjson.dumps({"field": name, "eq": value}).decode()
        return ""


def _column_of(values: dict[int, Value], rows: int) -> Column:
    """The column of a field: what each row that has a value has."""
    if kind_of(next(iter(values.values()))) == NUMBER:
        return NumberColumn.of(rows, {row: value for row, value in values.items() if isinstance(value, int | float)})
    return KeywordColumn.of([spell_all(values.get(row)) for row in range(rows)])
