"""Splits documents into sentences or passages, Chinese and English. A passage ends with a sentence where it can."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from models.curation.frame import Outcome, Step
from models.curation.rows import Row, is_document, passages_of, query_of
from models.rows import SENTENCE_END, count_units, unit_spans

PASSAGE_UNITS = 256
SHORTEST_CHARACTERS = 6
_CLAUSE_END = re.compile(r"(?<=[，、：])|(?<=[,:])\s+")


@dataclass(frozen=True)
class Split(Step):
    """A passage has at most `units` words and Chinese characters; pieces below `shortest` characters are left out."""

    by: Literal["sentence", "passage"] = "passage"
    units: int = PASSAGE_UNITS
    shortest: int = SHORTEST_CHARACTERS
    from_pairs: bool = False
    """Whether the positives of training rows are documents too, titled by the query."""

    name = "split"

    def parameters(self) -> dict[str, Any]:
        sized = {"units": self.units} if self.by == "passage" else {}
        return {"by": self.by, "shortest": self.shortest, "from_pairs": self.from_pairs, **sized}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        return map(self._split, rows)

    def _split(self, row: Row) -> Outcome:
        if not is_document(row) and not self.from_pairs:
            return Outcome(dropped="a training row, not a document: --from-pairs splits its positives")
        others = {name: value for name, value in row.items() if name not in ("query", "pos", "neg", "text", "title")}
        title = {"title": query_of(row)} if query_of(row) else {}
        cut = _sentences if self.by == "sentence" else self._passages
        parts = [part.strip() for text in passages_of(row) for part in cut(text)]
        kept = [part for part in parts if len(part) >= self.shortest]
        if not kept:
            return Outcome(dropped=f"no {self.by} of {self.shortest} characters or more")
        made = [{**others, **title, "text": part} for part in kept]
        if "id" in row and len(made) > 1:
            made = [{**each, "id": f"{row['id']}#{number}"} for number, each in enumerate(made, start=1)]
        return Outcome(made, notes={"pieces too short": len(parts) - len(kept)} if len(kept) < len(parts) else {})

    def _passages(self, text: str) -> list[str]:
        """Whole sentences together while they fit; one that is too long by itself is cut at clauses, then words."""
        passages, current, size = list[str](), "", 0
        for piece in self._small(text):
            units = count_units(piece)
            if current and size + units > self.units:
                passages.append(current)
                current, size = "", 0
            current, size = current + piece, size + units
        return [*passages, current]

    def _small(self, text: str) -> Iterator[str]:
        """Pieces of the text that fit a passage; joined, they are the text."""
        for sentence in _sentences(text):
            if count_units(sentence) <= self.units:
                yield sentence
                continue
            for clause in _cut(sentence, _CLAUSE_END):
                firsts = unit_spans(clause)[0][:: self.units][1:].tolist()
                yield from (clause[first:end] for first, end in zip([0, *firsts], [*firsts, None], strict=True))


def _sentences(text: str) -> list[str]:
    return _cut(text, SENTENCE_END)


def _cut(text: str, ends: re.Pattern[str]) -> list[str]:
    """The text cut after every match; the pieces, joined, are the text."""
    places = [0, *(match.end() for match in ends.finditer(text)), len(text)]
    return [text[first:end] for first, end in pairwise(places) if first < end]
