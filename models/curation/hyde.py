"""Data of SL-HyDE's loop: hypothetical documents for rows; the one that finds the row's source best is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.curation.asking import Answered, AskingStep, shortened
from models.curation.frame import Outcome, Tally
from models.curation.panel import NOTHING, Reply, Request
from models.curation.rows import Row, is_document, query_of
from models.curation.search import Retrievers
from models.curation.synthesize import TEMPERATURE
from models.encoder.spec import Side
from models.errors import CareError
from models.prompts import BLIND, fill

DOCUMENTS = 5
RANK = "rank"


@dataclass(frozen=True)
class Hyde(AskingStep):
    """Adds `hypothetical` to rows (equations 3 and 4): the one of `documents` drafts that ranks the source best.

    The source is the first positive. The writer reads it, unless `blind` (equation 7: what serving will do).
    """

    retrievers: Retrievers
    documents: int = DOCUMENTS
    blind: bool = False
    temperature: float = TEMPERATURE
    seed: int = 0

    name = "hyde"
    block = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.retrievers.encoders) != 1:
            raise CareError("hyde ranks drafts by one encoder: give --encoder FOLDER, once")

    @property
    def template(self) -> str:
        return BLIND if self.blind else "hyde"

    def parameters(self) -> dict[str, Any]:
        own = {"blind": self.blind, "documents": self.documents, "temperature": self.temperature, "seed": self.seed}
        return {**super().parameters(), **own, **self.retrievers.facts()}

    def requests(self, row: Row) -> list[Request]:
        if self._unusable(row):
            return []
        prompt = fill(self.prompt, query=query_of(row), text=shortened(row["pos"][0]))
        seeds = range(self.seed, self.seed + self.documents)
        return [Request(prompt, read_passage, self.reminder, self.temperature, seed) for seed in seeds]

    def decide(self, row: Row, replies: Sequence[Sequence[Reply]], notes: Counter[str]) -> Outcome:
        return self.decide_all([(row, replies, notes)])[0]

    def decide_all(self, answered: Sequence[Answered]) -> list[Outcome]:
        drafts = [self._drafts(row, replies) for row, replies, _ in answered]
        both = [(row, notes, some) for (row, _, notes), some in zip(answered, drafts, strict=True)]
        ranks = self._ranks([(row, some) for row, _, some in both if not isinstance(some, str)])
        return [
            Outcome(dropped=some, notes=notes) if isinstance(some, str) else _best(row, some, next(ranks), notes)
            for row, notes, some in both
        ]

    def _unusable(self, row: Row) -> str:
        """Returns why a row is dropped without a request; empty if it has a question and a source in the corpus."""
        if is_document(row):
            return "a document, no question: synthesize --kind query asks one"
        return "" if row["pos"][0] in self.retrievers.corpus.rows else "the first positive is not in the corpus"

    def _drafts(self, row: Row, replies: Sequence[Sequence[Reply]]) -> list[str] | str:
        """The different drafts of a row, or why there are none."""
        if reason := self._unusable(row):
            return reason
        values = dict.fromkeys(reply.value for of_draft in replies for reply in of_draft if reply.value is not None)
        return [draft for draft in values if draft != row["pos"][0]] or NOTHING

    def _ranks(self, rows: Sequence[tuple[Row, list[str]]]) -> Iterator[list[int]]:
        """For each row, the rank of its source for the query, and for each draft by itself."""
        if not rows:
            return
        # Texts of all rows are read together: a row's few would leave a GPU idle.
        dense, known = self.retrievers.dense[0], self.retrievers.corpus.rows
        asked = dense.ask([query_of(row) for row, _ in rows])
        read = dense.encoder.read([draft for _, drafts in rows for draft in drafts], Side.DOCUMENT)
        of_rows = np.split(read, np.cumsum([len(drafts) for _, drafts in rows])[:-1])
        for (row, _), query, some in zip(rows, asked, of_rows, strict=True):
            yield dense.ranks(np.vstack([query, some]), known[row["pos"][0]])

    def facts(self, tally: Tally) -> dict[str, Any]:
        names = ("query ranks its source first", "kept draft ranks its source first")
        found = {name: tally.notes[name] / tally.rows_out for name in names if tally.rows_out}
        return {**super().facts(tally), "found_first": found}


def _best(row: Row, drafts: Sequence[str], ranks: Sequence[int], notes: Counter[str]) -> Outcome:
    """The row with the draft that ranks the source best; `ranks` are those of the query and of each draft."""
    best = min(range(len(drafts)), key=lambda at: ranks[1 + at])
    notes["drafts"] += len(drafts)
    for name, rank in (("query", ranks[0]), ("kept draft", ranks[1 + best])):
        notes[f"{name} ranks its source first"] += int(rank == 1)
        notes[f"{name} ranks it among ten"] += int(rank <= 10)
    return Outcome([{**row, "hypothetical": [drafts[best]], RANK: ranks[1 + best]}], notes=notes)


def read_passage(text: str) -> str | None:
    """The passage without surrounding spaces; None if there is none."""
    return text.strip() or None
