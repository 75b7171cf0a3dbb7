"""Rows of curation: documents and training rows as dictionaries, whose unknown fields every step passes through."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from models.rows import Pair, parse_row, read_lines

Row = dict[str, Any]
CURATED = "curated"
"""The field that lists the steps a row has passed: [{step, version, parameters}, …]."""
NOT_A_ROW = "not a row with text, or with query and pos"


def read_rows(files: Sequence[Path]) -> Iterator[Row | None]:
    """The rows of JSON-lines files (plain, .gz, .xz) in order; None for a line that is not a row."""
    return (None if isinstance(parsed, str) else parsed[0] for parsed in _parsed(files))


def read_sourced(files: Sequence[Path]) -> Iterator[Row | None]:
    """As `read_rows`, each row with its `source`: the name of its file, without the endings, if it states none."""
    return (None if isinstance(parsed, str) else parsed[0] | {"source": parsed[1].source} for parsed in _parsed(files))


def _parsed(files: Sequence[Path]) -> Iterator[tuple[Row, Pair] | str]:
    return (parse_row(line) for path in files for line in read_lines(path))


def is_document(row: Row) -> bool:
    return "text" in row


def query_of(row: Row) -> str:
    """What asks for the row's texts: the query, or a document's title; empty for a document without one."""
    return str(row.get("title", "") if is_document(row) else row["query"])


def passages_of(row: Row) -> list[str]:
    """The texts that answer the query of a row, or the text of a document."""
    return [row["text"]] if is_document(row) else list(row["pos"])


def whole_text(row: Row) -> str:
    """The query or title and the passages, in lines, which equal rows share; the JSON of what is not a row yet."""
    if not is_document(row) and "query" not in row:
        return json.dumps(row, ensure_ascii=False)
    return "\n".join(part for part in (query_of(row), *passages_of(row)) if part)


def with_texts(row: Row, change: Callable[[str], str | None]) -> Row:
    """The row with every text changed; None removes one of a list and empties one that stands alone."""
    changed = dict(row)
    for name in ("title", "text", "query"):
        if isinstance(row.get(name), str):
            changed[name] = change(row[name]) or ""
    for name in ("pos", "neg", "hypothetical"):
        if isinstance(row.get(name), list):
            changed[name] = [text for text in map(change, row[name]) if text]
    return changed


def missing_text(row: Row) -> str:
    """Why a row whose texts were changed is not a row any more; empty if it still is."""
    if is_document(row):
        return "" if row["text"] else "no text left"
    if not row["query"]:
        return "no query left"
    return "" if row["pos"] else "no positive left"
