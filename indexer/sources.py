"""Reads raw rows from corpus files: JSON lines, CSV and Parquet, the first two also gzipped.

A row is a mapping of column names to values, or the reason why it cannot be read.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

import orjson

from indexer.errors import BadCorpus

_LONG_NUMBER = re.compile(r"\d{19}")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file; `line` counts from 1 (Parquet: the row's number). `columns` is None if `reason` says why."""

    file: str
    line: int
    columns: Mapping[str, object] | None
    source: bytes | None = None
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def raw(self) -> str:
        """The row as it stood in the file, as text that fits into JSON."""
        if self.source is not None:
            return self.source.decode("utf-8", errors="backslashreplace")
        text = json.dumps(self.columns, ensure_ascii=False, default=str)
        return text.encode("utf-8", errors="backslashreplace").decode()


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Lists the corpus files among files and folders, in a fixed order.

    A folder means every readable file under it, or only its file named corpus (BEIR's layout) if it has one.
    """
    files: list[Path] = []
    for path in paths:
        try:
            if path.is_file():
                files.append(path)
            elif path.is_dir():
                files += _files_of_folder(path)
            else:
                what = "is neither a file nor a folder" if path.exists() else "does not exist"
                raise BadCorpus(f"{path} {what}; give a corpus file or a folder of them")
        except PermissionError as error:
            raise _denied(error, path) from error
    return files


def read_rows(path: Path) -> Iterator[Row]:
    """Yields every row of one file; raises BadCorpus if the file cannot be read at all."""
    reader = _READERS.get(_suffix(path))
    if reader is None:
        raise BadCorpus(f"{path} is of no known kind; corpus files end in {', '.join(_READERS)} (also .gz)")
    try:
        yield from reader(path)
    except PermissionError as error:
        raise _denied(error, path) from error
    except gzip.BadGzipFile as error:
        fix = "fetch it again, or leave .gz out of its name if it is not compressed"
        raise BadCorpus(f"{path} is not gzip from beginning to end ({error}); {fix}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadCorpus(f"{path} cannot be read to its end ({error}); fetch it again") from error


def _denied(error: PermissionError, path: Path) -> BadCorpus:
    return BadCorpus(f"{error.filename or path} may not be read by this user; change its permissions or its owner")


def _files_of_folder(folder: Path) -> list[Path]:
    def fail(error: OSError) -> NoReturn:
        raise error

    # Not rglob, which skips folders that may not be read.
    found = (Path(place, name) for place, _, names in os.walk(folder, onerror=fail) for name in names)
    # A link that leads nowhere (its disk is not mounted) fails when it is read: its documents would be missing.
    files = sorted(path for path in found if _suffix(path) in _READERS and (path.is_file() or not path.exists()))
    visible = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    named = [path for path in visible if path.parent == folder and path.name.split(".")[0] == "corpus"]
    if not visible:
        raise BadCorpus(f"{folder} holds no corpus file ({', '.join(_READERS)}, also .gz)")
    return named or visible


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _read_json_lines(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            source = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).rstrip(b"\r\n")
            if source.strip():
                yield _json_row(str(path), number, source)


def _json_row(file: str, number: int, source: bytes) -> Row:
    try:
        text = source.decode("utf-8")
    except UnicodeDecodeError as error:
        return Row(file, number, None, source, _not_utf8(source, error))
    hint = ""
    if number == 1 and text.lstrip().startswith("["):
        hint = f"; if the file is one JSON array, write a line for each document: jq -c '.[]' {file}"
    elif number == 1 and text.strip() == "{":
        hint = f"; if objects take several lines, write a line for each document: jq -c . {file}"
    try:
        columns = exact_json(text)
    except json.JSONDecodeError as error:
        return Row(file, number, None, source, f"not JSON ({error.msg}, column {error.colno}){hint}")
    if not isinstance(columns, dict):
        return Row(file, number, None, source, f"not a JSON object{hint}")
    return Row(file, number, columns, source)


def exact_json(text: str) -> object:
    """Parses JSON; an integer of more than 64 bits, which orjson rounds, keeps its first 40 digits, which show it."""
    value = orjson.loads(text)
    if not _LONG_NUMBER.search(text):
        return value
    try:
        return json.loads(text, parse_int=lambda digits: int(digits[:40]))
    except RecursionError:
        raise json.JSONDecodeError("it is nested too deeply", text, 0) from None


def _not_utf8(source: bytes, error: UnicodeDecodeError) -> str:
    """Returns the reason, and which encoding the row seems to have."""
    reason = f"not UTF-8 (byte {error.start + 1})"
    if source.startswith((b"\xff\xfe", b"\xfe\xff")):
        return f"{reason}; it begins as UTF-16 does: convert the file with iconv -f UTF-16 -t UTF-8"
    if source.startswith(b"\x1f\x8b"):
        return f"{reason}; it begins as gzip does: let the file's name end in .gz"
    chinese = [each for each in source.decode("gb18030", errors="ignore") if "\u4e00" <= each <= "\u9fff"]
    # Two bytes a character: most of what is not ASCII must have become Chinese.
    if 4 * len(chinese) >= sum(byte > 127 for byte in source):
        return f"{reason}; it reads as GBK: convert the file with iconv -f GB18030 -t UTF-8"
    return reason


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # the default refuses a text of 128 KiB; the limit is global to the module
    record: list[str] = []  # the raw lines of the current record

    def remembered(lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            record.append(line)
            yield line

    def source() -> bytes:
        return "".join(record).encode("utf-8", errors="surrogateescape").rstrip(b"\r\n")

    with _open(path) as binary, io.TextIOWrapper(binary, "utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(remembered(file), strict=True)
        try:
            header = next(reader, [])
            source().decode("utf-8")
        except csv.Error as error:
            raise BadCorpus(f"{path}: its first line, the columns, is not CSV ({error}); correct it") from error
        except UnicodeDecodeError as error:
            raise BadCorpus(f"{path}: its first line is {_not_utf8(source(), error)}") from error
        if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
            named = {"\t": "tabs"}.get(other, other)
            raise BadCorpus(f"{path}: its columns are separated by {named}; write it with commas, or as JSON lines")
        _require_distinct(header, path)
        while True:
            first_line = reader.line_num + 1
            record.clear()
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                reason = f"not CSV ({error}; the record takes {reader.line_num - first_line + 1} lines)"
                yield Row(str(path), first_line, None, source(), reason)
                continue
            columns, reason = None, f"{len(values)} columns, the first line names {len(header)}"
            if len(values) == len(header):
                try:
                    source().decode("utf-8")
                    # CSV spells a missing value as an empty cell.
                    columns, reason = {name: value or None for name, value in zip(header, values, strict=True)}, ""
                except UnicodeDecodeError as error:
                    reason = _not_utf8(source(), error)
            if values:
                yield Row(str(path), first_line, columns, source(), reason)


def _require_distinct(names: list[str], path: Path) -> None:
    if len(set(names)) < len(names):
        raise BadCorpus(f"{path} names a column twice; give each column a name of its own")


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException  # pyarrow is large, and few corpora need it
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        hint = "pip install 'care-search[parquet]', or use the image `indexer`"
        raise BadCorpus(f"{path}: reading Parquet needs pyarrow; {hint}") from error
    try:
        file = ParquetFile(path)
        _require_distinct(file.schema_arrow.names, path)
        rows = (columns for batch in file.iter_batches() for columns in batch.to_pylist())
        for number, columns in enumerate(rows, start=1):
            yield Row(str(path), number, columns)
    except (ArrowException, UnicodeDecodeError, OverflowError) as error:  # also texts and dates beyond Python's
        raise BadCorpus(f"{path} is not readable Parquet ({error}); fetch or write it again") from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json_lines),
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
