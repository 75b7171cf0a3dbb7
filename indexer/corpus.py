"""Streams documents from corpus files, and those of the service's log after them (`indexer.log_changes`).

A row that is not a valid document is rejected with the reason. Field names are BEIR's (_id, title, text, metadata)
unless a FieldMap says otherwise. A document has a text or a title.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from indexer.errors import BadCorpus, BadValue
from indexer.log_changes import LogChanges
from indexer.sources import Row, exact_json, find_files, read_rows
from indexer.store.documents import StoredDocument, id_fault, is_blank
from indexer.store.files import DiskDict
from indexer.store.filters import Value, as_value, has_value, kind_of, read_number, require_name
from indexer.store.fresh_log import NewDocument, Posted

logger = logging.getLogger(__name__)

TITLE = "title"
METADATA = "metadata"
# The dictionary of ids holds a place as one number: the file's number above these bits, the line below.
LINE_BITS = 40
SHOWN_ROWS = 5
SHOWN_NAMES = 12
SHOWN_ID = 80


class Rejects(AbstractContextManager["Rejects"]):
    """Counts bad rows; with a path, writes them to that file (JSON lines: file, line, reason, raw)."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.count = 0
        self._first: list[str] = []
        self._file: BinaryIO | None = None

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: Row, reason: str) -> None:
        self.count += 1
        if len(self._first) < SHOWN_ROWS:
            self._first.append(f"{row.place}: {reason}")
        if self.path is not None:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("wb")
            fields = {"file": row.file, "line": row.line, "reason": reason, "raw": row.raw}
            self._file.write(orjson.dumps(fields) + b"\n")

    def refuse(self) -> None:
        """Raises BadCorpus if there are bad rows and no file for them."""
        if self.count and self.path is None:
            more = f"; and {self.count - len(self._first)} more" if self.count > len(self._first) else ""
            raise BadCorpus(
                f"{self.count} bad rows: {'; '.join(self._first)}{more}. Correct them or set them aside with --skip-bad"
            )


@dataclass(frozen=True)
class FieldMap:
    """Which column is what; `metadata` holds an object, `metadata_fields` are further columns of metadata.

    `number_fields` are metadata whose texts are read as numbers: keys of the object, or further columns.
    """

    id: str = "_id"
    title: str = TITLE
    text: str = "text"
    metadata: str = METADATA
    metadata_fields: tuple[str, ...] = ()
    number_fields: tuple[str, ...] = ()

    def used_names(self) -> set[str]:
        """Returns the columns that are read."""
        return {self.id, self.title, self.text, self.metadata, *self.metadata_fields, *self.number_fields}

    def expected_names(self) -> set[str]:
        """Columns that some row must have: one that no row has is a slip in the mapping."""
        return ({self.title, self.metadata} - {TITLE, METADATA}) | {self.text} | set(self.metadata_fields)


@dataclass(frozen=True, slots=True)
class Document(NewDocument):
    """A document and its place, as `file:line`; `kept`: it was posted to the service, and no corpus has it."""

    place: str
    kept: bool = False


class _BadRow(Exception):
    """The reason why a row is not a document."""


def read_corpus(
    paths: Sequence[Path],
    fields: FieldMap,
    rejects: Rejects,
    ids: DiskDict,
    log: LogChanges | None = None,
    columns: set[str] | None = None,
) -> Iterator[Document]:
    """Yields every good document of the files and folders, in order, then those of the log; rejects other rows.

    `ids`, an empty dictionary, receives the ids, `columns` the name of every column. Raises BadCorpus at the end if
    there was no document at all, or if a column named in `fields` never occurred.
    """
    columns = set() if columns is None else columns
    log = log or LogChanges()
    checker = _Checker(fields, ids, log)
    count = withdrawn = 0
    for path in find_files(paths):
        for row in read_rows(path):
            columns.update(row.columns or ())
            try:
                document = checker.check(row)
            except _BadRow as bad:
                rejects.add(row, str(bad))
                log.meet_rejected(checker.id_of(row))
            else:
                if log.decides(document.id):
                    withdrawn += 1
                else:
                    count += 1
                    yield document
    for posted, kept in log.documents(ids):
        count += 1
        yield checker.check_posted(posted, kept)
    rejects.refuse()
    names = ", ".join(str(path) for path in paths)
    if not count:
        if withdrawn:
            raise BadCorpus(f"{names}: all {withdrawn} documents were deleted by the service; post or add at least one")
        where = f", set aside in {rejects.path}" if rejects.count else ""
        raise BadCorpus(f"{names}: no documents ({rejects.count} bad rows{where}); an empty corpus cannot be searched")
    if missing := (fields.expected_names() - columns) | (set(fields.number_fields) - checker.numbers):
        raise BadCorpus(
            f"{names}: no row has a field named {listed(missing)}; the rows have {listed(columns)}: map one of these "
            "(--field text=NAME and the like)"
        )


def listed(names: Iterable[str]) -> str:
    """Lists the first few of the sorted names for a message."""
    ordered = sorted(names)
    first, others = ordered[:SHOWN_NAMES], len(ordered) - SHOWN_NAMES
    return ", ".join(first) + (f" and {others} more" if others > 0 else "")


class _Checker:
    """Turns rows into documents; remembers ids and field kinds, which later rows must respect.

    A row whose document the log replaces or deletes has no part in the kinds. `numbers` collects the number fields that
    some row has.
    """

    def __init__(self, fields: FieldMap, ids: DiskDict, log: LogChanges) -> None:
        self._fields = fields
        self._ids = ids
        self._log = log
        self._files: dict[str, int] = {}
        self._kinds: dict[str, tuple[str, str]] = {}
        self.numbers: set[str] = set()

    def check(self, row: Row) -> Document:
        if row.columns is None:
            raise _BadRow(row.reason)
        columns, fields = row.columns, self._fields
        document = Document(
            self._id(columns), self._text("title", columns), self._text("text", columns), self._metadata(row), row.place
        )
        if is_blank(document.text) and is_blank(document.title):
            nowhere = f"neither text in field {fields.text} nor a title in field {fields.title}"
            raise _BadRow(f"{nowhere}; the row has {listed(columns)} (map others with --field text=NAME, title=NAME)")
        is_kept = document.id not in self._log
        for name, value in document.metadata.items() if is_kept else ():
            self._require_kind(name, value)
        # Last of all the checks: the id of a row that was rejected is free.
        file = self._files.setdefault(row.file, len(self._files))
        first = self._ids.add(document.id, (file << LINE_BITS) + row.line)
        if first is not None:
            name = list(self._files)[first >> LINE_BITS]
            raise _BadRow(f"repeated id {document.id!r}, first at {name}:{first & ((1 << LINE_BITS) - 1)}")
        if is_kept:
            self._remember_kinds(document)
        return document

    def check_posted(self, posted: Posted | StoredDocument, kept: bool) -> Document:
        """Takes a document that the service acknowledged: it is never refused, but a field may match no filter."""
        metadata = {name: as_value(name, value) for name, value in posted.metadata.items()}
        place = f"posted to the service ({posted.id})"
        for name, value in metadata.items():
            try:
                self._require_kind(name, value)
            except _BadRow as bad:
                logger.warning("%s: %s; filters on %s do not match it: post it again", place, bad, name)
        document = Document(posted.id, posted.title, posted.text, metadata, place, kept)
        self._remember_kinds(document)
        return document

    def _remember_kinds(self, document: Document) -> None:
        for name, value in document.metadata.items():
            if has_value(value):
                self._kinds.setdefault(name, (kind_of(value), document.place))

    def id_of(self, row: Row) -> str | None:
        """Returns the id of a row that may be bad otherwise; None if the id cannot be read."""
        try:
            return self._id(row.columns or {})
        except _BadRow:
            return None

    def _id(self, columns: Mapping[str, object]) -> str:
        value = columns.get(self._fields.id)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or value == "":
            here = listed(columns)
            raise _BadRow(f"no id in field {self._fields.id}; the row has {here} (map another with --field id=NAME)")
        if not isinstance(value, str):
            raise _BadRow(f"the id in field {self._fields.id} is neither text nor a whole number")
        if fault := id_fault(value):
            raise _BadRow(f"the id {value[:SHOWN_ID]!r}{'…' * (len(value) > SHOWN_ID)} {fault}")
        return value

    def _text(self, what: str, columns: Mapping[str, object]) -> str:
        column = getattr(self._fields, what)
        value = columns.get(column)
        if value is not None and not isinstance(value, str):
            raise _BadRow(f"the {what} in field {column} is not text")
        return value or ""

    def _metadata(self, row: Row) -> dict[str, Value]:
        columns, fields = row.columns or {}, self._fields
        given = _as_object(fields.metadata, columns.get(fields.metadata))
        given |= {name: columns[name] for name in (*fields.metadata_fields, *fields.number_fields) if name in columns}
        self.numbers.update(given.keys() & fields.number_fields)
        metadata: dict[str, Value] = {}
        for name, value in given.items():
            if name in fields.number_fields and isinstance(value, str):
                if (parsed := read_number(value)) is None:
                    raise _BadRow(f"metadata field {name} is not a number: {value!r}")
                value = parsed
            if isinstance(value, float) and math.isnan(value):
                value = None  # how data frames spell a missing number
            try:
                require_name(name)
                metadata[name] = as_value(name, value)
            except BadValue as bad:
                raise _BadRow(str(bad)) from None
        return metadata

    def _require_kind(self, name: str, value: Value) -> None:
        kind, place = self._kinds.get(name, ("", ""))
        if kind and has_value(value) and kind_of(value) != kind:
            raise _BadRow(f"metadata field {name} is {kind_of(value)} here and {kind} at {place}")


def _as_object(column: str, value: object) -> dict[str, object]:
    """Returns the object in the metadata column; CSV and some Parquet files hold it as JSON text."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = exact_json(value)
        except ValueError:
            raise _BadRow(f"the metadata in field {column} is not a JSON object") from None
    if not isinstance(value, dict):
        raise _BadRow(f"the metadata in field {column} is not an object")
    return dict(value)
