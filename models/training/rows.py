"""Training rows: how files are read, and crops, halves and sentences of their texts.

A row is {query, pos: [...], neg?: [...], instruction?, source?, hypothetical?: [...]}, or a document {text, title?,
source?}: its title asks for it, and without a title one part of it asks for the other.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from models.errors import BadData
from models.training.recipe import CROP_UNITS, Data, Units

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
UNIT = re.compile(r"[\u3400-\u9fff]|[^\s\u3400-\u9fff]+")
SENTENCE_END = re.compile(r"(?<=[。！？!?；;])|(?<=\.)\s+|\n+")
SHORTEST_SENTENCE = 6
QUERIES = "queries"
"""The source of queries among texts: they can be drawn more often than the sentences of documents."""


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
    stem: str
    """The file's, a row's source if it names none."""
    where: str


def read_pairs(path: Path) -> Iterator[Pair]:
    """The rows of a JSON-lines file, plain, .gz or .xz."""
    return (require_pair(line) for line in read_lines(path))


def sample(files: Sequence[Path], size: int, seed: int) -> tuple[int, list[Pair]]:
    """How many rows the files hold, and `size` of them at random: all are passed, only those are parsed."""
    chance, drawn, count = random.Random(seed), list[Line](), 0
    for line in (line for path in files for line in read_lines(path)):
        count += 1
        place = len(drawn) if len(drawn) < size else chance.randrange(count)
        if place < size:
            drawn[place : place + 1] = [line]
    return count, [require_pair(line) for line in drawn]


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, plain, .gz or .xz."""
    opener: Any = _OPENERS.get(path.suffix, open)
    stem = path.name.partition(".")[0]
    try:
        file: IO[str] = opener(path, "rt", encoding="utf-8")
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                yield Line(line, stem, f"{path}:{number}")
        except (EOFError, OSError, UnicodeDecodeError, lzma.LZMAError) as error:
            raise BadData(f"{path}:{number + 1}: damaged: {error}; fetch the file again") from error


def require_pair(line: Line) -> Pair:
    """The row of a line; raises BadData with the place of one that is none."""
    parsed = parse_row(line)
    if isinstance(parsed, str):
        raise BadData(f"{line.where}: {parsed}")
    return parsed[1]


def parse_row(line: Line) -> tuple[dict[str, Any], Pair] | str:
    """The row of a line, as it stands and as a pair, or why it is none."""
    try:
        row = json.loads(line.text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg}"
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


def sampled(
    rows: Iterable[Pair], shares: Mapping[str, float], halved: Mapping[str, float], seed: int
) -> Iterator[Pair]:
    """Each row with the chance that its source has ("*": all others), the same rows for the same seed.

    A share `halved` of them loses its query, so that a part of the document asks for the rest (`as_pairs`).
    """
    chance = random.Random(seed)
    for row in rows:
        if chance.random() < shares.get(row.source, shares.get("*", 1.0)):
            alone = chance.random() < halved.get(row.source, halved.get("*", 0.0))
            yield replace(row, query="", positives=row.positives[:1], negatives=[]) if alone else row


def as_pairs(rows: Iterable[Pair], crops: Mapping[str, float], seed: int, units: Units = CROP_UNITS) -> Iterator[Pair]:
    """Every row as a question and its answer, followed by crops of its documents that ask for them."""
    chance = random.Random(seed)
    for row in rows:
        if row.query:
            yield row
        else:
            parts = halves(row.positives[0], chance)
            if parts is not None:
                yield replace(row, query=parts[0], positives=[parts[1]])
        for document in row.positives:
            for asking in crops_of(document, _how_many(crops, row.source, chance), chance, units):
                yield Pair(asking, [document], [], row.source)


def as_texts(rows: Iterable[Pair], data: Data, seed: int) -> Iterator[tuple[str, str]]:
    """The texts of the rows that the stage reads, each with its source. Texts may come twice."""
    chance = random.Random(seed)
    for row in rows:
        if row.query:
            yield row.query, QUERIES
        for document in (*row.positives, *row.negatives):
            if data.documents:
                yield document, row.source
            for part in crops_of(document, _how_many(data.crops, row.source, chance), chance, data.crop_units):
                yield part, row.source
            if data.sentences:
                yield from ((sentence, row.source) for sentence in sentences_of(document))


def crops_of(text: str, count: int, chance: random.Random, units: Units = CROP_UNITS) -> Iterator[str]:
    """Random spans of whole words or Chinese characters; a text that is shorter than any is its own."""
    # Looking for the units is most of the work of reading millions of texts: once for all crops.
    places = [match.span() for match in UNIT.finditer(text)] if count else []
    shortest, longest = units
    for _ in range(count):
        if len(places) <= shortest:
            yield text
            continue
        size = chance.randint(shortest, min(longest, len(places)))
        first = chance.randint(0, len(places) - size)
        yield text[places[first][0] : places[first + size - 1][1]]


def count_units(text: str) -> int:
    """Words and Chinese characters: about as many as a tokenizer makes of it."""
    return sum(1 for _ in UNIT.finditer(text))


def halves(text: str, chance: random.Random) -> tuple[str, str] | None:
    """Two parts of a text that share nothing, the first of them cropped; None where there is too little to part."""
    units = [match.span() for match in UNIT.finditer(text)]
    if len(units) < 2 * CROP_UNITS[0]:
        return None
    cut = units[chance.randint(len(units) // 3, 2 * len(units) // 3)][0]
    parts = [text[:cut].strip(), text[cut:].strip()]
    if chance.random() < 0.5:
        parts.reverse()
    return next(crops_of(parts[0], 1, chance)), parts[1]


def sentences_of(text: str) -> list[str]:
    """The sentences of a text of more than one."""
    parts = [part.strip() for part in SENTENCE_END.split(text)]
    kept = [part for part in parts if len(part) >= SHORTEST_SENTENCE]
    return kept if len(parts) > 1 else []


def _how_many(crops: Mapping[str, float], source: str, chance: random.Random) -> int:
    wanted = crops.get(source, crops.get("*", 0.0))
    return int(wanted) + (chance.random() < wanted % 1)
