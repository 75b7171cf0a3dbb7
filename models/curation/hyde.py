"""Data of SL-HyDE's loop: hypothetical documents for rows; the one that finds the row's source best is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from models.curation.frame import Outcome, Tally, digest
from models.curation.panel import AskingStep, Limits, Model, Reply, Request
from models.curation.rows import Row, is_document, query_of
from models.curation.search import Retrievers
from models.curation.synthesize import NOTHING, PASSAGE_CHARACTERS, REMINDER, TEMPERATURE
from models.encoder.spec import Side
from models.prompts import BLIND, LANGUAGE, fill, load

DOCUMENTS = 5
RANK = "rank"


@dataclass(frozen=True)
class Hyde(AskingStep):
    """Adds `hypothetical` to rows (equations 3 and 4): the one of `documents` drafts that ranks the source best.

    The source is the first positive. The writer reads it, unless `blind` (equation 7: what serving will do).
    """

    models: Sequence[Model]
    answers: Path
    retrievers: Retrievers
    language: str = LANGUAGE
    documents: int = DOCUMENTS
    blind: bool = False
    temperature: float = TEMPERATURE
    seed: int = 0
    limits: Limits = Limits()  # noqa: RUF009 - frozen

    name = "hyde"

    @cached_property
    def prompt(self) -> str:
        return load(BLIND if self.blind else "hyde", self.language)

    def parameters(self) -> dict[str, Any]:
        own = {"models": [model.name for model in self.models], "prompt": digest(self.prompt), "blind": self.blind}
        used = {"documents": self.documents, "temperature": self.temperature, "seed": self.seed}
        return {**own, **used, "max_tokens": self.limits.max_tokens, **self.retrievers.facts()}

    def requests(self, row: Row) -> list[Request]:
        if is_document(row):
            return []
        text = " ".join(row["pos"][0][:PASSAGE_CHARACTERS].split())
        prompt, reminder = fill(self.prompt, query=query_of(row), text=text), REMINDER[self.language]
        seeds = range(self.seed, self.seed + self.documents)
        return [Request(prompt, read_passage, reminder, self.temperature, seed) for seed in seeds]

    def decide(self, row: Row, replies: Sequence[Sequence[Reply]], notes: Counter[str]) -> Outcome:
        if is_document(row):
            return Outcome(dropped="a document, no question: synthesize --kind query asks one")
        source = self.retrievers.corpus.rows.get(row["pos"][0])
        if source is None:
            return Outcome(dropped="the first positive is not in the corpus", notes=notes)
        drafts = [reply.value for of_draft in replies for reply in of_draft if reply.value is not None]
        drafts = [draft for draft in dict.fromkeys(drafts) if draft != row["pos"][0]]
        if not drafts:
            return Outcome(dropped=NOTHING, notes=notes)
        ranks = self._ranks([query_of(row), *drafts], source)
        best = min(range(len(drafts)), key=lambda at: ranks[1 + at])
        notes["drafts"] += len(drafts)
        for name, rank in (("query", ranks[0]), ("kept draft", ranks[1 + best])):
            notes[f"{name} ranks its source first"] += int(rank == 1)
            notes[f"{name} ranks it among ten"] += int(rank <= 10)
        return Outcome([{**row, "hypothetical": [drafts[best]], RANK: ranks[1 + best]}], notes=notes)

    def _ranks(self, texts: Sequence[str], source: int) -> list[int]:
        """The rank of the source for the query, and for each draft by itself."""
        dense = self.retrievers.dense[0]
        vectors = (*dense.ask(texts[:1]), *dense.encoder.read(texts[1:], Side.DOCUMENT))
        return [dense.rank(vector, source) for vector in vectors]

    def facts(self, tally: Tally) -> dict[str, Any]:
        names = ("query ranks its source first", "kept draft ranks its source first")
        return {"found_first": {name: tally.notes[name] / tally.rows_out for name in names if tally.rows_out}}


def read_passage(text: str) -> str | None:
    """The passage without surrounding spaces; None if there is none."""
    return text.strip() or None
