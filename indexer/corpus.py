"""Documents out of corpus files, in a stream; every row that makes no good document is rejected with its reason.

Field names are BEIR's (_id, title, text, metadata) unless a FieldMap says otherwise. A document has a text or a title.
Knows nothing of encoders or of the snapshot's files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson

from indexer.errors import BadCorpus
from indexer.fresh import Given, LogWord
from indexer.sources import Row, find_files, read_rows
from indexer.store.files import DiskDict
from indexer.store.filters import BadValue, Value, as_value, has_value, kind_of, read_number

SHOWN = 5


class Rejects:
    """Collects bad rows. With a path they go to that file (JSON lines: file, line, reason, raw), made at need."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.count = 0
        self._first: list[str] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> Rejects:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, row: Row, reason: str) -> None:
        self.count += 1
        if len(self._first) < SHOWN:
            self._first.append(f"{row.place}: {reason}")
        if self.path is not None:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("wb")
            fields = {"file": row.file, "line": row.line, "reason": reason, "raw": row.raw}
            self._file.write(orjson.dumps(fields) + b"\n")

    def refuse(self) -> None:
        """Raises BadCorpus if there are bad rows and nobody said where to set them aside."""
        if self.count and self.path is None:
            more = f"; and {self.count - len(self._first)} more" if self.count > len(self._first) else ""
            raise BadCorpus(
                f"{self.count} bad rows: {'; '.join(self._first)}{more}. Mend them, or set them aside with --skip-bad"
            )


logger = logging.getLogger(__name__)

TITLE = "title"
METADATA = "metadata"
# A place is one number for the dictionary of ids: the file's number above these bits, the line below.
LINE_BITS = 40
SHOWN_NAMES = 12
# Where a document stands that the service was given.
GIVEN = "posted to the service"


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

    def used_names(self) -> set[str]:
        """The columns that are read; any other is ignored."""
        return {self.id, self.title, self.text, self.metadata, *self.metadata_fields}

    def expected_names(self) -> set[str]:
        """The columns that a row may lack but not all rows: one that no row has is a slip in the mapping."""
        return ({self.title, self.metadata} - {TITLE, METADATA}) | {self.text} | set(self.metadata_fields)


@dataclass(frozen=True, slots=True)
class Document:
    """What the caller gave, and the place where it stood, as `file:line`."""

    id: str
    title: str
    text: str
    metadata: dict[str, Value]
    place: str
    kept: bool = False
    """Whether it comes from the service, and no corpus has it."""


class _BadRow(Exception):
    """Why a row makes no document."""


def read_corpus(
    paths: Sequence[Path],
    fields: FieldMap,
    rejects: Rejects,
    ids: DiskDict,
    word: LogWord | None = None,
    columns: set[str] | None = None,
) -> Iterator[Document]:
    """Every good document of the files and folders, in order, then those of the log; other rows go to `rejects`.

    `ids` is an empty dictionary, in which ids are remembered; `word` is what the service was given since. `columns`
    receives the name of every column. Raises BadCorpus at the end if there was no document at all, or if a column named
    in `fields` never occurred.
    """
    columns = set() if columns is None else columns
    word = word or LogWord()
    checker = _Checker(fields, ids)
    count = 0
    for path in find_files(paths):
        for row in read_rows(path):
            columns.update(row.columns or ())
            try:
                document = checker.check(row)
            except _BadRow as bad:
                rejects.add(row, str(bad))
            else:
                if not word.decides(document.id):
                    count += 1
                    yield document
    for given in word.documents(ids):
        count += 1
        yield checker.check_given(given)
    rejects.refuse()
    names = ", ".join(str(path) for path in paths)
    if not count:
        where = f", set aside in {rejects.path}" if rejects.count else ""
        raise BadCorpus(f"{names}: no documents ({rejects.count} bad rows{where}); an empty corpus cannot be searched")
    if missing := fields.expected_names() - columns:
        raise BadCorpus(
            f"{names}: no row has a field named {listed(missing)}; the rows have {listed(columns)}: map one of these "
            "(--field text=NAME and the like)"
        )


def listed(names: Collection[str]) -> str:
    """Sorted names for a message, the first few of them."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(sorted(names)[:SHOWN_NAMES]) + more


class _Checker:
    """Turns rows into documents; remembers ids and field kinds, because those bind later rows."""

    def __init__(self, fields: FieldMap, ids: DiskDict) -> None:
        self._fields = fields
        self._ids = ids
        self._files: dict[str, int] = {}
        self._kinds: dict[str, tuple[str, str]] = {}

    def check(self, row: Row) -> Document:
        if row.columns is None:
            raise _BadRow(row.reason)
        document = Document(
            id=self._id(row.columns),
            title=_as_text("title", self._fields.title, row.columns.get(self._fields.title)),
            text=_as_text("text", self._fields.text, row.columns.get(self._fields.text)),
            metadata=self._metadata(row),
            place=row.place,
        )
        if not document.text.strip() and not document.title.strip():
            nowhere = f"neither text in field {self._fields.text} nor a title in field {self._fields.title}"
            raise _BadRow(
                f"{nowhere}; the row has {listed(row.columns)} (map others with --field text=NAME, title=NAME)"
            )
        self._remember(document.id, row)
        self._remember_kinds(document)
        return document

    def check_given(self, given: Given) -> Document:
        """A document that the service acknowledged: it is never refused.

        If a field holds another kind of value in the corpus by now, the document is shown with its own, and no filter
        on the field matches it.
        """
        metadata = {name: as_value(name, value) for name, value in given.metadata.items()}
        document = Document(given.id, given.title, given.text, metadata, f"{GIVEN} ({given.id})", given.kept)
        for name, value in metadata.items():
            try:
                self._as_known(name, value)
            except _BadRow as bad:
                logger.warning("%s: %s; filters on %s do not match it: post it again", document.place, bad, name)
        self._remember_kinds(document)
        return document

    def _remember_kinds(self, document: Document) -> None:
        for name, value in document.metadata.items():
            if has_value(value):
                self._kinds.setdefault(name, (kind_of(value), document.place))

    def _id(self, columns: Mapping[str, object]) -> str:
        value = columns.get(self._fields.id)
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None or value == "":
            here = listed(columns)
            raise _BadRow(f"no id in field {self._fields.id}; the row has {here} (map another with --field id=NAME)")
        if not isinstance(value, str):
            raise _BadRow(f"the id in field {self._fields.id} is neither text nor a whole number")
        return value

    def _remember(self, document_id: str, row: Row) -> None:
        """Last of all the checks: the id of a row that was rejected is free."""
        file = self._files.setdefault(row.file, len(self._files))
        first = self._ids.add(document_id, (file << LINE_BITS) + row.line)
        if first is not None:
            name = list(self._files)[first >> LINE_BITS]
            raise _BadRow(f"repeated id {document_id!r}, first at {name}:{first & ((1 << LINE_BITS) - 1)}")

    def _metadata(self, row: Row) -> dict[str, Value]:
        columns = row.columns or {}
        given = _as_object(self._fields.metadata, columns.get(self._fields.metadata))
        given |= {name: columns[name] for name in self._fields.metadata_fields if name in columns}
        metadata = {}
        for name, item in given.items():
            metadata[name] = self._as_known(name, _as_value(name, item, number=name in self._fields.number_fields))
        return metadata

    def _as_known(self, name: str, value: Value) -> Value:
        kind, place = self._kinds.get(name, ("", ""))
        if kind and has_value(value) and kind_of(value) != kind:
            raise _BadRow(f"metadata field {name} is {kind_of(value)} here and {kind} at {place}")
        return value


def _as_text(what: str, column: str, value: object) -> str:
    if value is not None and not isinstance(value, str):
        raise _BadRow(f"the {what} in field {column} is not text")
    return value or ""


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
    if number and isinstance(value, str):
        if (parsed := read_number(value)) is None:
            raise _BadRow(f"metadata field {name} is not a number: {value!r}")
        value = parsed
    try:
        return as_value(name, value)
    except BadValue as bad:
        raise _BadRow(str(bad)) from None
