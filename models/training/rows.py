"""Turns rows into the training pairs and texts of a stage, including crops, halves and sentences.

A document without a title becomes a pair by asking with one part of it for the other.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from zlib import crc32

from models.errors import BadData
from models.rows import SENTENCE_END, Pair, unit_spans
from models.training.stages import CROP_UNITS, Data, Units

SHORTEST_SENTENCE = 6
QUERIES = "queries"
"""The source of queries among texts: they can be drawn more often than the sentences of documents."""


def sampled(
    rows: Iterable[Pair], shares: Mapping[str, float], halved: Mapping[str, float], seed: int
) -> Iterator[Pair]:
    """Yields each row with the chance that its source has ("*": all others), the same rows for the same seed.

    A share `halved` of them loses its query, so that a part of the document asks for the rest (`as_pairs`). A source
    that no row is of is refused after the last one, unless its share is 0.
    """
    chance, seen = random.Random(seed), {"*"}
    for row in rows:
        seen.add(row.source)
        if chance.random() < shares.get(row.source, shares.get("*", 1.0)):
            alone = chance.random() < halved.get(row.source, halved.get("*", 0.0))
            yield replace(row, query="", positives=row.positives[:1], negatives=[]) if alone else row
    for key, named in (("sample", shares), ("halves", halved)):
        if missing := sorted(source for source, share in named.items() if share and source not in seen):
            raise BadData(f"{key}: no row is of {', '.join(missing)}; the files have {', '.join(sorted(seen - {'*'}))}")


def without(rows: Iterable[Pair], sources: Collection[str]) -> Iterator[Pair]:
    """Yields the rows that are of none of these sources; a source that no row is of is refused after the last one."""
    missing = set(sources)
    for row in rows:
        missing.discard(row.source)
        if row.source not in sources:
            yield row
    if missing:
        raise BadData(f"data.without: no row is of {', '.join(sorted(missing))}")


def as_pairs(rows: Iterable[Pair], crops: Mapping[str, float], seed: int, units: Units = CROP_UNITS) -> Iterator[Pair]:
    """Yields every row as a question and its answer, followed by crops of its documents that ask for them."""
    for row in rows:
        chance = _chance(row, seed)
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
    """Yields the texts of the rows that the stage reads, each with its source. Texts may come twice."""
    for row in rows:
        chance = _chance(row, seed)
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
    if not count:
        return
    begins, ends = unit_spans(text)
    shortest, longest = units
    for _ in range(count):
        if len(begins) <= shortest:
            yield text
            continue
        size = chance.randint(shortest, min(longest, len(begins)))
        first = chance.randint(0, len(begins) - size)
        yield text[begins[first] : ends[first + size - 1]]


def halves(text: str, chance: random.Random) -> tuple[str, str] | None:
    """Two parts of a text that share nothing, the first of them cropped; None if the text is too short."""
    begins, _ = unit_spans(text)
    if len(begins) < 2 * CROP_UNITS[0]:
        return None
    cut = begins[chance.randint(len(begins) // 3, 2 * len(begins) // 3)]
    parts = [text[:cut].strip(), text[cut:].strip()]
    if chance.random() < 0.5:
        parts.reverse()
    return next(crops_of(parts[0], 1, chance)), parts[1]


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of a text, none if it has only one."""
    parts = [part.strip() for part in SENTENCE_END.split(text)]
    kept = [part for part in parts if len(part) >= SHORTEST_SENTENCE]
    return kept if len(parts) > 1 else []


def _chance(row: Pair, seed: int) -> random.Random:
    """The row's own: it has the same crops whatever rows come before it, so runs without some of them share vectors."""
    return random.Random(crc32(f"{row.query}\n{row.positives[0]}".encode("utf-8", "surrogatepass"), seed))


def _how_many(crops: Mapping[str, float], source: str, chance: random.Random) -> int:
    wanted = crops.get(source, crops.get("*", 0.0))
    return int(wanted) + (chance.random() < wanted % 1)
