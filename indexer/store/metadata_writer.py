"""Writes the filter columns of `metadata` while documents stream by: a document costs no memory, nor does a value.

A column collects into files with working names, since the order of the fields, a text's final code and whether a field
holds lists are known only at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from indexer.store.arrays import Array, ArrayWriter, BlobWriter, load_array
from indexer.store.disk_dict import DiskDict
from indexer.store.documents import Metadata, Value
from indexer.store.metadata import FIELDS_FILE, FieldKind
from indexer.store.values import NUMBER, has_value, kind_of, spell, split_number

BLOCK = 1 << 18


class MetadataWriter:
    """One column a field, made when the field first has a value."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fields: dict[str, _Keywords | _Numbers] = {}
        self._documents = 0

    def add(self, metadata: Metadata) -> None:
        """The next document's metadata. A value of another kind than the field's first is in no column."""
        for name, value in metadata.items():
            if not has_value(value):
                continue
            if name not in self._fields:
                self._fields[name] = self._column_for(value)
            column = self._fields[name]
            if isinstance(column, _Numbers) == (kind_of(value) == NUMBER):
                column.add(self._documents, value)
        self._documents += 1

    def release(self) -> None:
        """Gives up the open files of a build that failed."""
        for column in self._fields.values():
            column.release()

    def close(self) -> None:
        """Completes the files."""
        fields = []
        for position, (name, column) in enumerate(sorted(self._fields.items())):
            kind = column.write(self._folder, f"metadata.{position}", self._documents)
            fields.append({"name": name, "kind": kind})
        (self._folder / FIELDS_FILE).write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2))

    def _column_for(self, value: Value) -> _Keywords | _Numbers:
        stem = self._folder / f"metadata-unsorted-{len(self._fields)}"
        return _Numbers(stem) if kind_of(value) == NUMBER else _Keywords(stem)


class _Numbers:
    """A number a document, NaN if it has none; a file of rests only if a whole number was rounded."""

    def __init__(self, stem: Path) -> None:
        self._paths = stem.with_suffix(".values.npy"), stem.with_suffix(".rests.npy")
        self._values, self._rests = ArrayWriter(self._paths[0], "<f8"), ArrayWriter(self._paths[1], "<i2")
        self._exact = True

    def add(self, row: int, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"a number column was given {value!r}")
        self._pad(row)
        nearest, rest = split_number(value)
        self._values.append([nearest])
        self._rests.append([rest])
        self._exact &= not rest

    def release(self) -> None:
        self._values.release()
        self._rests.release()

    def write(self, folder: Path, stem: str, documents: int) -> FieldKind:
        self._pad(documents)
        self._values.close()
        self._rests.close()
        self._paths[0].rename(folder / f"{stem}.values.npy")
        if self._exact:
            self._paths[1].unlink()
        else:
            self._paths[1].rename(folder / f"{stem}.rests.npy")
        return FieldKind.NUMBER

    def _pad(self, rows: int) -> None:
        if missing := rows - len(self._values):
            self._values.append(np.full(missing, np.nan))
            self._rests.append(np.zeros(missing, np.int16))


class _Keywords:
    """Codes in order of first sight, and where each document's begin; write() gives them their final form."""

    def __init__(self, stem: Path) -> None:
        self._starts_path, self._codes_path = stem.with_suffix(".starts.npy"), stem.with_suffix(".codes.npy")
        self._starts = ArrayWriter(self._starts_path, "<i8")
        self._codes = ArrayWriter(self._codes_path, "<i4")
        self._vocabulary = DiskDict(stem.with_suffix(".vocabulary"))
        self._values = 0
        self._lists = False

    def add(self, row: int, value: object) -> None:
        self._pad(row)
        self._starts.append([len(self._codes)])
        if isinstance(value, list | tuple):
            self._lists = True
            self._codes.append([self._code(item) for item in dict.fromkeys(value)])
        else:
            self._codes.append([self._code(value)])

    def release(self) -> None:
        self._starts.release()
        self._codes.release()
        self._vocabulary.close()

    def write(self, folder: Path, stem: str, documents: int) -> FieldKind:
        self._pad(documents + 1)
        self._starts.close()
        final = self._write_vocabulary(folder, f"{stem}.vocabulary")
        starts = load_array(self._starts_path, "<i8", (documents + 1,))
        codes = load_array(self._codes_path, "<i4", (self._codes.close(),))
        with ArrayWriter(folder / f"{stem}.codes.npy", "<i4") as column:
            for block in _every_code(codes, final) if self._lists else _code_of_each(starts, codes, final):
                column.append(block)
            column.close()
        self._codes_path.unlink()
        if self._lists:
            self._starts_path.rename(folder / f"{stem}.starts.npy")
            return FieldKind.KEYWORDS
        self._starts_path.unlink()
        return FieldKind.KEYWORD

    def _code(self, value: object) -> int:
        code = self._vocabulary.setdefault(spell(value), self._values)
        self._values += code == self._values
        return code

    def _pad(self, rows: int) -> None:
        """Documents without a value begin where the next begins."""
        if missing := rows - len(self._starts):
            self._starts.append(np.full(missing, len(self._codes)))

    def _write_vocabulary(self, folder: Path, name: str) -> NDArray[np.int32]:
        """The texts in order; returns the final code of each code."""
        final = np.empty(self._values, dtype=np.int32)
        blob = BlobWriter(folder, name)
        for code, (text, first_code) in enumerate(self._vocabulary.sorted_items()):
            blob.append(text)
            final[first_code] = code
        blob.close()
        self._vocabulary.close()
        return final


def _every_code(codes: Array, final: NDArray[np.int32]) -> Iterator[Array]:
    for start in range(0, len(codes), BLOCK):
        yield final[codes[start : start + BLOCK]]


def _code_of_each(starts: Array, codes: Array, final: NDArray[np.int32]) -> Iterator[Array]:
    """One code a document, −1 where there is none."""
    for first in range(0, len(starts) - 1, BLOCK):
        bounds = starts[first : first + BLOCK + 1]
        dense = np.full(len(bounds) - 1, -1, dtype=np.int32)
        dense[bounds[1:] > bounds[:-1]] = final[codes[bounds[0] : bounds[-1]]]
        yield dense
