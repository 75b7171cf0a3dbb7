"""Documents out of corpus files, in a stream; every row that makes no good document is rejected with its reason.

Field names are BEIR's (_id, title, text, metadata) unless a FieldMap says otherwise. Knows nothing of encoders or of
the store's files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import orjson

from indexer.errors import BadCorpus
from indexer.rejects import Rejects
from indexer.sources import Row, find_files, read_rows
from indexer.store.documents import Value

TITLE = "title"
METADATA = "metadata"


@dataclass(frozen=True)
class FieldMap:
    """Which column is what.

    `metadata` is a column that holds an object; `metadata_fields` are further columns that become metadata under
    their own names; `number_fields` are metadata that the file spells as text, as CSV must.
    """

    id: str = "_id"
    title: str = TITLE
    text: str = "text"
    metadata: str = METADATA
    metadata_fields: tuple[str, ...] = ()
    number_fields: tuple[str, ...] = ()

    def optional_names(self) -> set[str]:
        """The columns that a row may lack but somebody asked for by name: one that no row has is a slip."""
        return ({self.title, self.metadata} - {TITLE, METADATA}) | set(self.metadata_fields)


@dataclass(frozen=True, slots=True)
class Document:
    """What the caller gave, and the place where it stood, as `file:line`."""

    id: str
    title: str
    text: str
    metadata: dict[str, Value]
    place: str


class _BadRow(Exception):
    """Why a row makes no document."""


def read_corpus(paths: Sequence[Path], fields: FieldMap, rejects: Rejects) -> Iterator[Document]:
    """Every good document of the files and folders, in order; the other rows go to `rejects`.

    Raises BadCorpus at the end if there was no document at all, or if a column named in `fields` never occurred.
    """
    checker = _Checker(fields)
    missing = fields.optional_names()
    count = 0
    for path in find_files(paths):
        for row in read_rows(path):
            missing -= row.columns.keys() if missing and row.columns else set()
            try:
                document = checker.check(row)
            except _BadRow as bad:
                rejects.add(row, str(bad))
            else:
                count += 1
                yield document
    rejects.refuse()
    names = ", ".join(str(path) for path in paths)
    if not count:
        where = f", set aside in {rejects.path}" if rejects.count else ""
        raise BadCorpus(f"{names}: no documents ({rejects.count} bad rows{where}); an empty corpus cannot be searched")
    if missing:
        raise BadCorpus(f"{names}: no row has a field named {', '.join(sorted(missing))}; correct the mapping")


class _Checker:
    """Turns rows into documents; remembers ids and field kinds, because those bind later rows."""

    def __init__(self, fields: FieldMap) -> None:
        self._fields = fields
        self._places: dict[str, str] = {}
        self._kinds: dict[str, tuple[str, str]] = {}

    def check(self, row: Row) -> Document:
        if row.columns is None:
            raise _BadRow(row.reason)
        document = Document(
            id=self._id(row.columns.get(self._fields.id)),
            title=self._title(row.columns.get(self._fields.title)),
            text=self._text(row.columns.get(self._fields.text)),
            metadata=self._metadata(row),
            place=row.place,
        )
        self._places[document.id] = row.place
        for name, value in document.metadata.items():
            if value is not None:
                self._kinds.setdefault(name, (_kind(value), row.place))
        return document

    def _id(self, value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or value == "":
            raise _BadRow(f"no id in field {self._fields.id} (map another with --field id=NAME)")
        if not isinstance(value, str):
            raise _BadRow(f"the id in field {self._fields.id} is neither text nor a whole number")
        if value in self._places:
            raise _BadRow(f"repeated id {value!r}, first at {self._places[value]}")
        return value

    def _title(self, value: object) -> str:
        if value is not None and not isinstance(value, str):
            raise _BadRow(f"the title in field {self._fields.title} is not text")
        return value or ""

    def _text(self, value: object) -> str:
        if value is not None and not isinstance(value, str):
            raise _BadRow(f"the text in field {self._fields.text} is not text")
        if value is None or not value.strip():
            raise _BadRow(f"no text in field {self._fields.text} (map another with --field text=NAME)")
        return value

    def _metadata(self, row: Row) -> dict[str, Value]:
        columns = row.columns or {}
        given = _as_object(self._fields.metadata, columns.get(self._fields.metadata))
        given |= {name: columns[name] for name in self._fields.metadata_fields if name in columns}
        metadata = {}
        for name, item in given.items():
            value = _as_value(name, item, number=name in self._fields.number_fields)
            kind, place = self._kinds.get(name, ("", ""))
            if kind and value is not None and _kind(value) != kind:
                raise _BadRow(f"metadata field {name} is {_kind(value)} here and {kind} at {place}")
            metadata[name] = value
        return metadata


def _as_object(column: str, value: object) -> dict[str, object]:
    """The object in the metadata column; CSV and some Parquet files hold it as JSON text."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise _BadRow(f"the metadata in field {column} is not a JSON object") from None
    if not isinstance(value, dict):
        raise _BadRow(f"the metadata in field {column} is not an object")
    return dict(value)


def _as_value(name: str, value: object, *, number: bool) -> Value:
    """A metadata value as the store takes it; dates become ISO texts, which sort as dates do."""
    if isinstance(value, date):  # a datetime is a date too
        return value.isoformat()
    if number and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _BadRow(f"metadata field {name} is not a number: {value!r}") from None
    if isinstance(value, float) and not math.isfinite(value):
        return None  # Parquet files made from data frames spell a missing number this way
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise _BadRow(f"metadata field {name} is neither text, number, true/false nor a list of texts")


def _kind(value: Value) -> str:
    return "a number" if isinstance(value, int | float) and not isinstance(value, bool) else "text"
