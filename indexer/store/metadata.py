"""The metadata of all documents as filter columns: conditions in, a boolean array over document rows out.

Files: `metadata.json` (the fields in order: name and kind) and, for the field at position i, `metadata.<i>.*`.
What a hit shows of its metadata is not read from here but from its document.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np
import orjson

from indexer.store.arrays import BlobWriter, save_array
from indexer.store.columns import Column, KeywordColumn, Mask, NumberColumn
from indexer.store.documents import Metadata
from indexer.store.errors import BadFilter, BadSnapshot
from indexer.store.filters import Filter, Range

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

    @property
    def fields(self) -> list[str]:
        return list(self._columns)

    def select(self, filters: Sequence[Filter]) -> Mask:
        """Which documents satisfy every filter, (documents,)."""
        mask = np.ones(self._documents, dtype=np.bool_)
        for condition in filters:
            mask &= self._column(condition).match(condition)
        return mask

    def facets(self) -> dict[str, dict[str, int]]:
        """For each field of few distinct texts: how many documents have each, the most frequent first."""
        return {
            name: column.counts()
            for name, column in self._columns.items()
            if isinstance(column, KeywordColumn) and len(column) <= FACET_VALUES
        }

    def _column(self, condition: Filter) -> Column:
        field = condition.field
        if field not in self._columns:
            known = ", ".join(self._columns) or "none"
            raise BadFilter(field, f"filter on {field}: the collection has no such field; it has {known}")
        if isinstance(condition, Range) and condition == Range(field):
            raise BadFilter(field, f"filter on {field}: a range needs at least one of gte, gt, lte, lt")
        return self._columns[field]


class MetadataWriter:
    """Collects the columns while documents stream by; writes them at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fields: dict[str, _Keywords | _Numbers] = {}
        self._documents = 0

    def add(self, metadata: Metadata) -> None:
        """The next document's metadata. The corpus reader has seen to it that no field mixes numbers and texts."""
        for name, value in metadata.items():
            if value is None or value == []:
                continue
            if name not in self._fields:
                self._fields[name] = _column_for(value)
            self._fields[name].add(self._documents, value)
        self._documents += 1

    def close(self) -> None:
        fields = []
        for position, (name, column) in enumerate(sorted(self._fields.items())):
            kind = column.write(self._folder, f"metadata.{position}", self._documents)
            fields.append({"name": name, "kind": kind})
        (self._folder / FIELDS_FILE).write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2))


class _Numbers:
    """Sparse numbers: which rows have one, and which number."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._values = array("d")

    def add(self, row: int, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"a number column was given {value!r}")
        self._rows.append(row)
        self._values.append(float(value))

    def write(self, folder: Path, stem: str, documents: int) -> FieldKind:
        values = np.full(documents, np.nan)
        values[np.asarray(self._rows)] = self._values
        save_array(folder / f"{stem}.values.npy", values, "<f8")
        return FieldKind.NUMBER


class _Keywords:
    """Sparse texts: a (row, code) pair each, codes in order of first sight until write() sorts the vocabulary."""

    def __init__(self) -> None:
        self._rows = array("q")
        self._codes = array("i")
        self._vocabulary: dict[str, int] = {}
        self._lists = False

    def add(self, row: int, value: object) -> None:
        if isinstance(value, list | tuple):
            self._lists = True
            values = [_spell(item) for item in dict.fromkeys(value)]
        else:
            values = [_spell(value)]
        for text in values:
            self._rows.append(row)
            self._codes.append(self._vocabulary.setdefault(text, len(self._vocabulary)))

    def write(self, folder: Path, stem: str, documents: int) -> FieldKind:
        vocabulary = BlobWriter(folder, f"{stem}.vocabulary")
        final = np.empty(len(self._vocabulary), dtype=np.int32)
        for code, text in enumerate(sorted(self._vocabulary)):
            vocabulary.append(text.encode())
            final[self._vocabulary[text]] = code
        vocabulary.close()
        rows, codes = np.asarray(self._rows), final[np.asarray(self._codes)]
        if self._lists:
            starts = np.searchsorted(rows, np.arange(documents + 1))
            save_array(folder / f"{stem}.starts.npy", starts, "<i8")
            save_array(folder / f"{stem}.codes.npy", codes, "<i4")
            return FieldKind.KEYWORDS
        dense = np.full(documents, -1, dtype=np.int32)
        dense[rows] = codes
        save_array(folder / f"{stem}.codes.npy", dense, "<i4")
        return FieldKind.KEYWORD


def _column_for(value: object) -> _Keywords | _Numbers:
    return _Numbers() if isinstance(value, int | float) and not isinstance(value, bool) else _Keywords()


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise TypeError(f"a text column was given {value!r}")
    return value
