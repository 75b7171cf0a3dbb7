"""Reads rows of JSON-lines files (documents and training rows), checks them, and counts words and characters.

A row is {query, pos: [...], neg?: [...], instruction?, source?, hypothetical?: [...]}, or a document {text, title?,
source?}: its title asks for it.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.errors import BadData

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_UNIT = re.compile(r"[\u3400-\u9fff]|[^\s\u3400-\u9fff]+")
_FIRST_CHINESE, _LAST_CHINESE = 0x3400, 0x9FFF
# No character from U+3001 on is a space; the last entry stands for them.
_IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])
_HALF = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[。！？!?；;])|(?<=\.)\s+|\n+")


@dataclass(frozen=True, slots=True)
class Pair:
    """One training row: a query, texts that answer it, texts that do not."""

    query: str
    """Empty for a document without a title."""
    positives: list[str]
    negatives: list[str]
    source: str
    instruction: str | None = None
    """Stands before the query in place of the encoder's own."""
    hypothetical: list[str] = field(default_factory=list)
    """Documents that a language model imagined for the query (HyDE)."""


class Line(NamedTuple):
    """A line of a file, not yet parsed."""

    text: str
    path: Path
    number: int

    @property
    def stem(self) -> str:
        """Returns the name of the file without its endings: a row's source if it names none."""
        return self.path.name.partition(".")[0]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.number}"


def read_pairs(path: Path) -> Iterator[Pair]:
    """Reads the rows of a JSON-lines file, plain, .gz or .xz."""
    return (require_pair(line) for line in read_lines(path))


def sample(files: Sequence[Path], size: int, seed: int) -> tuple[int, list[Pair]]:
    """Counts the rows of the files and draws `size` of them at random; only those are parsed."""
    chance, drawn, count = random.Random(seed), list[Line](), 0
    for line in (line for path in files for line in read_lines(path)):
        count += 1
        place = len(drawn) if len(drawn) < size else chance.randrange(count)
        if place < size:
            drawn[place : place + 1] = [line]
    return count, [require_pair(line) for line in drawn]


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines of a file, plain, .gz or .xz, but for blank ones."""
    return (line for line in every_line(path) if line.text and not line.text.isspace())


def every_line(path: Path) -> Iterator[Line]:
    """Yields the lines of a file, plain, .gz or .xz; a damaged one, or one that is not UTF-8, is named."""
    opener: Any = _OPENERS.get(path.suffix, open)
    number = 0
    try:
        file: IO[bytes] = opener(path, "rb")
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        try:
            for number, line in enumerate(file, start=1):
                # By line, so that a fault is in the line that is named. The first may have a mark at its beginning.
                yield Line(line.decode("utf-8-sig" if number == 1 else "utf-8"), path, number)
        except UnicodeDecodeError as error:
            hint = "convert the file, as with iconv -f GB18030 -t UTF-8"
            raise BadData(f"{path}:{number}: damaged or not UTF-8: {error}; {hint}") from error
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if isinstance(error, gzip.BadGzipFile | lzma.LZMAError) and not number:
                hint = "correct its name, or fetch it again"
                raise BadData(f"{path}: not {path.suffix[1:]}, or damaged at its beginning; {hint}") from error
            raise BadData(f"{path}:{number + 1}: damaged: {error}; fetch the file again") from error


def write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes a JSON-lines file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("w", encoding="utf-8", errors="replace") as file:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False), file=file)
    unfinished.replace(path)


def require_pair(line: Line) -> Pair:
    """Parses the row of a line; raises BadData with its place if it is not a row."""
    parsed = parse_row(line)
    if isinstance(parsed, str):
        raise BadData(f"{line.where}: {parsed}")
    return parsed[1]


def parse_row(line: Line) -> tuple[dict[str, Any], Pair] | str:
    """Parses a line: returns its row as a dictionary and as a pair, or why it is not a row."""
    try:
        row = json.loads(line.text)
        if _HALF.search(line.text):  # half of a character, which no tokenizer, server or file takes
            row = json.loads(json.dumps(row, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(row, dict) or not ("text" in row or {"query", "pos"} <= row.keys()):
        return "not a training row: it must have query and pos, or text"
    source = row.get("source", line.stem)
    if "text" in row:
        pair = Pair(row.get("title", ""), [row["text"]], [], source)
    else:
        extras = {"instruction": row.get("instruction"), "hypothetical": row.get("hypothetical", [])}
        pair = Pair(row["query"], row["pos"], row.get("neg", []), source, **extras)
    lists = (pair.positives, pair.negatives, pair.hypothetical)
    if not all(isinstance(texts, list) for texts in lists):
        return "pos, neg and hypothetical must be lists of strings"
    if not isinstance(pair.query, str) or (not pair.query and "text" not in row):
        return "query must be a non-empty string"
    if not pair.positives or not all(isinstance(text, str) and text for texts in lists for text in texts):
        return "pos must hold at least one text, and no text may be empty"
    if not isinstance(pair.source, str) or not isinstance(pair.instruction, str | None):
        return "source and instruction must be strings"
    return row, pair


def read_all(files: Sequence[Path]) -> Iterator[Pair]:
    return (pair for path in files for pair in read_pairs(path))


def unit_spans(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns where each unit begins and ends: a Chinese character, or a run of others without a space.

    By arrays: the texts of a training run have a hundred million of them.
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    alone = (codes >= _FIRST_CHINESE) & (codes <= _LAST_CHINESE)
    inside = ~(alone | _IS_SPACE[np.minimum(codes, len(_IS_SPACE) - 1)])
    first, last = inside.copy(), inside.copy()
    first[1:] &= ~inside[:-1]
    last[:-1] &= ~inside[1:]
    return np.flatnonzero(alone | first), np.flatnonzero(alone | last) + 1


def count_units(text: str) -> int:
    """Counts words and Chinese characters: about the number of tokens."""
    return len(_UNIT.findall(text))
