"""Matches queries to documents that hold evidence for an answer: CMIRB's Algorithm 1 with a language model.

One task a run, in the order of TASKS. `pool --bm25 --depth 20` stands between the first two (the algorithm's line 14),
`judge` after the last (lines 27 to 33).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.curation.asking import PASSAGE_CHARACTERS, AskingStep, shortened
from models.curation.frame import Outcome
from models.curation.judge import numbered
from models.curation.panel import NOTHING, Reply, Request
from models.curation.rows import Row, is_document, query_of, whole_text
from models.curation.synthesize import json_values
from models.errors import CareError
from models.prompts import fill

SELECTED = 3
SELECT_CHARACTERS = 600
"""Of each passage that is selected from: 20 stand in one request."""
EVIDENCE, ANSWERS, REFERENCE = "evidence", "answers", "answer"
"""Fields of a row: spans and an answer for each positive; the known answer of an exam's question."""

Fields = Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """Requests of a task and how answers are read; a false answer drops the row or the passage."""

    key: str
    """The key of the JSON object that holds the answer."""
    fits: Callable[[Any], bool]
    fields: Callable[[Match, Row], Sequence[Fields] | str]
    """The fields of each request: one of the row, or one of each positive; or why there is none."""
    why: str
    """Why a row is dropped whose answers are all false."""
    keep: Callable[[Match, Row, list[Any]], Row]
    """The row with its answers, None for those without use."""


@dataclass(frozen=True)
class Match(AskingStep):
    """Asks one model; `selected` is how many of a row's passages the task `select` keeps."""

    task: str
    selected: int = SELECTED

    name = "match"
    forms = ("passage",)

    def __post_init__(self) -> None:
        if len(self.models) > 1:
            raise CareError("--model: one model matches; several judge the result (care curate judge)")

    @property
    def template(self) -> str:
        return self.task

    def parameters(self) -> dict[str, Any]:
        shown = {"selected": self.selected, "characters": [PASSAGE_CHARACTERS, SELECT_CHARACTERS]}
        return {**super().parameters(), "task": self.task, **shown}

    def requests(self, row: Row) -> list[Request]:
        task = TASKS[self.task]
        asked, read = task.fields(self, row), partial(read_value, key=task.key, fits=task.fits)
        if isinstance(asked, str):
            return []
        return [Request(fill(self.prompt, **each), read, self.reminder) for each in asked]

    def decide(self, row: Row, replies: Sequence[Sequence[Reply]], notes: Counter[str]) -> Outcome:
        task = TASKS[self.task]
        if not replies:
            return Outcome(dropped=str(task.fields(self, row)), notes=notes)
        values = [reply.value for (reply,) in replies]
        if missing := sum(value is None for value in values):
            notes["answers without use"] += missing
        if missing == len(values):
            return Outcome(dropped=NOTHING, notes=notes)
        made = task.keep(self, row, values)
        notes["passages kept"] += len(made.get("pos", ()))
        return Outcome([made], notes=notes) if any(values) and made.get("pos", True) else Outcome(
            dropped=task.why, notes=notes
        )  # fmt: skip


def read_value(text: str, *, key: str, fits: Callable[[Any], bool]) -> Any | None:  # noqa: ANN401
    """Returns the value of the only key in the last JSON object of an answer; None if none fits."""
    for value in reversed(json_values(text, "{")):
        if isinstance(value, dict) and value.keys() == {key} and fits(value[key]):
            return value[key]
    return None


def _is_label(value: Any) -> bool:  # noqa: ANN401
    return type(value) is int and value in (0, 1)


def are(kind: type) -> Callable[[Any], bool]:
    """Returns whether a value is a list of this type only."""
    return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)


def _passages(step: Match, row: Row) -> Sequence[Fields] | str:
    if is_document(row):
        return NO_QUERY
    passages = numbered(row["pos"], SELECT_CHARACTERS, step.language)
    return [{"query": query_of(row), "count": str(step.selected), "passages": passages}]


def _documents(step: Match, row: Row) -> Sequence[Fields] | str:
    """The evidence is looked for with the known answer, if there is one."""
    known = str(row.get(REFERENCE, "")) or {"zh": "（未给出）", "en": "(not given)"}[step.language]
    asked = [{"query": query_of(row), "answer": known, "text": shortened(text)} for text in row.get("pos", ())]
    return asked or NO_QUERY


def _evidence(step: Match, row: Row) -> Sequence[Fields] | str:
    found = row.get(EVIDENCE)
    if not (isinstance(found, list) and all(map(are(str), found)) and 0 < len(found) == len(row.get("pos", ()))):
        return "no evidence: match --task extract finds it"
    return [{"query": query_of(row), "evidence": "\n".join(spans)} for spans in found]


def _written(step: Match, row: Row) -> Sequence[Fields] | str:
    """An answer is compared with the known one, or with its document if there is none."""
    found = row.get(ANSWERS)
    if not (are(str)(found) and found and len(found) == len(row.get("pos", ()))):
        return "no answer: match --task answer writes it"
    known = str(row.get(REFERENCE, ""))
    return [
        {"query": query_of(row), "answer": answer, "reference": known or shortened(text)}
        for answer, text in zip(found, row["pos"], strict=True)
    ]


def _selected(step: Match, row: Row, values: list[Any]) -> Row:
    places = [place for place in dict.fromkeys(values[0]) if 1 <= place <= len(row["pos"])]
    return {**row, "pos": [row["pos"][place - 1] for place in places[: step.selected]]}


def _only(row: Row, values: Sequence[Any], **new: list[Any]) -> Row:
    """The row with the positives whose value is true, and what belongs to them."""
    lists = {name: row[name] for name in ("pos", EVIDENCE, ANSWERS) if name in row} | new
    return {**row, **{name: [v for v, good in zip(of, values, strict=True) if good] for name, of in lists.items()}}


def _extracted(step: Match, row: Row, values: list[Any]) -> Row:
    """Keeps spans that stand in the document, but for spaces: models invent some."""
    texts = ["".join(text.split()) for text in row["pos"]]
    spans = [
        [span.strip() for span in found or () if (plain := "".join(span.split())) and plain in text]
        for text, found in zip(texts, values, strict=True)
    ]
    return _only(row, spans, evidence=spans)


def _checked(step: Match, row: Row, values: list[Any]) -> Row:
    """Without evidence and answers, which later steps would leave beside other positives."""
    return {name: value for name, value in _only(row, values).items() if name not in (EVIDENCE, ANSWERS)}


NO_QUERY = "a document, no query with passages: pool gives them"
TASKS = {
    "medical": Task("medical", _is_label, lambda step, row: [{"text": shortened(whole_text(row))}], "not medical",
                    lambda step, row, values: row),
    "select": Task("passages", are(int), _passages, "no passage selected", _selected),
    "extract": Task("evidence", are(str), _documents, "no evidence in any passage", _extracted),
    "answer": Task("answer", lambda value: isinstance(value, str), _evidence, "the evidence answers nothing",
                   lambda step, row, values: _only(row, values, answers=values)),
    "check": Task("same", _is_label, _written, "no answer is confirmed", _checked),
}  # fmt: skip
