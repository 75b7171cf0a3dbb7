"""Judges the passages of training rows by several language models and keeps those on which all agree."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations
from typing import Any

from models.curation.asking import PASSAGE_CHARACTERS, AskingStep, shortened
from models.curation.frame import Outcome, Tally, digest
from models.curation.panel import Reply, Request
from models.curation.rows import Row, is_document, passages_of, query_of
from models.errors import CareError
from models.prompts import fill, load

GRADES = range(5)
BATCH, RELEVANT, IRRELEVANT = 10, 3, 2
VOTES = "votes "
JUDGED, DISPUTED = "judged", "disputed"
ROWS_JUDGED, POSITIVES = "rows judged", "positives judged"
RIGHT_POSITIVES, RIGHT_NEGATIVES = "positives kept", "negatives kept"
FALSE_NEGATIVES, FALSE_POSITIVES = "negatives that are relevant", "positives that are irrelevant"
NO_QUERY = "a document without a title: there is no query to judge it by"
_OBJECT = re.compile(r"\{[^{}]*\}?", re.DOTALL)
# Bounded repeats: an answer of spaces or digits alone would take the square of its length.
_PAIR = re.compile(
    r"[\"']?(?:passage|段落)?[ _-]{0,3}(?<!\d)(\d{1,4})[\"']?\s{0,20}[:：]\s{0,20}"
    r"[\"']?(\d{1,2})[\"']?\s{0,20}(?=[,，}\n]|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class JudgeRows(AskingStep):
    """Positives of the output: all judges gave `relevant` or more; negatives: all gave `irrelevant` or less.

    With `promote` false, a negative that is relevant is dropped instead of becoming a positive.
    """

    batch: int = BATCH
    relevant: int = RELEVANT
    irrelevant: int = IRRELEVANT
    promote: bool = True

    name = template = "judge"
    forms = ("passage",)
    version = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.irrelevant < self.relevant <= max(GRADES):
            raise CareError("--irrelevant must be below --relevant, and both between 0 and 4")

    @cached_property
    def reminder(self) -> str:
        return load("reminder-grades", self.language)

    def parameters(self) -> dict[str, Any]:
        grades = {"relevant": self.relevant, "irrelevant": self.irrelevant, "promote": self.promote}
        return {**super().parameters(), **grades, "batch": self.batch, "characters": PASSAGE_CHARACTERS}

    def _batches(self, row: Row) -> list[list[str]]:
        """The passages of a row, by their hashes: neither positives first, nor another order in another run."""
        texts = sorted({*passages_of(row), *row.get("neg", [])}, key=digest) if query_of(row) else []
        return [texts[first : first + self.batch] for first in range(0, len(texts), self.batch)]

    def requests(self, row: Row) -> list[Request]:
        made = []
        for texts in self._batches(row):
            passages = numbered(texts, PASSAGE_CHARACTERS, self.language)
            prompt = fill(self.prompt, query=query_of(row), passages=passages)
            read = partial(read_grades, passages=len(texts))
            made.append(Request(prompt, read, self.reminder, schema=_schema(len(texts))))
        return made

    def decide(self, row: Row, replies: Sequence[Sequence[Reply]], notes: Counter[str]) -> Outcome:
        if not replies:
            return Outcome(dropped=NO_QUERY)
        grades = dict[str, list[int]]()
        for texts, verdicts in zip(self._batches(row), replies, strict=True):
            usable = [verdict.value for verdict in verdicts if verdict.value is not None]
            if len(usable) == len(verdicts):
                grades.update(zip(texts, map(list, zip(*usable, strict=True)), strict=True))
            else:
                notes["passages without a grade of every judge"] += len(texts)
        return self._outcome(row, grades, notes)

    def _outcome(self, row: Row, grades: Mapping[str, list[int]], notes: Counter[str]) -> Outcome:
        notes.update(VOTES + " ".join(map(str, votes)) for votes in grades.values())
        relevant = [text for text, votes in grades.items() if min(votes) >= self.relevant]
        irrelevant = [text for text, votes in grades.items() if max(votes) <= self.irrelevant]
        disputed = [text for text in grades if text not in relevant and text not in irrelevant]
        old = {"positives": passages_of(row), "negatives": row.get("neg", [])}
        false_negatives = set(relevant) & set(old["negatives"])
        notes[ROWS_JUDGED] += bool(grades)
        notes[POSITIVES] += len(set(grades) & set(old["positives"]))
        notes[RIGHT_POSITIVES] += len(set(relevant) & set(old["positives"]))
        notes[RIGHT_NEGATIVES] += len(set(irrelevant) & set(old["negatives"]))
        notes[FALSE_NEGATIVES] += len(false_negatives)
        notes[FALSE_POSITIVES] += len(set(irrelevant) & set(old["positives"]))
        if not self.promote:
            relevant = [text for text in relevant if text not in false_negatives]
        flags = {}
        if disputed:
            shown = f"{grades[disputed[0]]} {query_of(row)[:60]} | {disputed[0][:120]}"
            flags["judges disagree on a passage"] = shown
        made: dict[str, Any] = {"notes": {name: count for name, count in notes.items() if count}, "flags": flags}
        if not grades:
            return Outcome(dropped="no passage has a grade of every judge", **made)
        if not relevant:
            return Outcome(dropped="no passage is relevant to every judge", **made)
        if is_document(row):
            return Outcome([{**row, JUDGED: {"pos": [grades[row["text"]]]}}], **made)
        # In the order of the row, so that the first positive stays the first.
        order = [*old["positives"], *old["negatives"]]
        pos, neg = (sorted(texts, key=order.index) for texts in (relevant, irrelevant))
        judged = {"pos": [grades[text] for text in pos], "neg": [grades[text] for text in neg]}
        more = {DISPUTED: sorted(disputed, key=order.index)} if disputed else {}
        return Outcome([{**row, "pos": pos, "neg": neg, JUDGED: judged, **more}], **made)

    def facts(self, tally: Tally) -> dict[str, Any]:
        """Agreement of the panel: on the five grades, on relevant or not, and of every two judges."""
        votes = {
            tuple(map(int, name.removeprefix(VOTES).split())): count
            for name, count in tally.notes.items()
            if name.startswith(VOTES)
        }
        relevant = Counter[tuple[int, ...]]()
        for given, count in votes.items():
            relevant[tuple(int(grade >= self.relevant) for grade in given)] += count
        total = sum(votes.values())
        pairs = {}
        for one, other in combinations(range(len(self.models)), 2):
            same = sum(count for given, count in votes.items() if given[one] == given[other])
            pairs[f"{self.models[one].name} and {self.models[other].name}"] = same / total if total else None
        agreement = {"passages": total, "kappa_grades": fleiss_kappa(votes), "kappa_relevant": fleiss_kappa(relevant)}
        more = {"agreement": {**agreement, "same_grade": pairs}, "labels": _labels(tally.notes)}
        return {**super().facts(tally), **more}


def numbered(texts: Sequence[str], characters: int, language: str) -> str:
    """Passages with their numbers, as prompts list them."""
    form = load("passage", language)
    shown = enumerate((shortened(text, characters) for text in texts), start=1)
    return "\n\n".join(fill(form, number=str(number), text=text) for number, text in shown)


def _labels(notes: Mapping[str, int]) -> dict[str, float | None]:
    """Compares the judges with the labels that rows came with: by query (CARE's table 20), and their agreement."""
    names = (RIGHT_POSITIVES, FALSE_POSITIVES, FALSE_NEGATIVES, RIGHT_NEGATIVES)
    kept, wrong, missed, right = (notes.get(name, 0) for name in names)
    rows, both = notes.get(ROWS_JUDGED, 0), kept + wrong + missed + right
    counts = {"positives": notes.get(POSITIVES, 0), "judged_positives": kept + missed,
              "false_positives": wrong, "false_negatives": missed}  # fmt: skip
    kappa = fleiss_kappa({(1, 1): kept, (1, 0): wrong, (0, 1): missed, (0, 0): right})
    agreed = {"agreement": (kept + right) / both, "kappa": kappa} if both else {}
    return {"queries": rows, **{name: count / rows for name, count in counts.items() if rows}, **agreed}


def _schema(passages: int) -> dict[str, Any]:
    """Returns the JSON schema of an answer, a grade for every passage."""
    grades = {str(number): {"type": "integer", "enum": list(GRADES)} for number in range(1, passages + 1)}
    return {"type": "object", "properties": grades, "required": list(grades), "additionalProperties": False}


def read_grades(text: str, passages: int) -> list[int] | None:
    """The grades of an answer: its last object with a grade for every passage, and no other; None if there is none.

    Repaired are code fences, text around the object, single quotes, trailing commas, and a missing last brace.
    """
    wanted = {str(number) for number in range(1, passages + 1)}
    for found in reversed(_OBJECT.findall(text)):
        pairs = _PAIR.findall(found)
        grades = dict(pairs)
        values = [int(grade) for grade in grades.values()]
        if grades.keys() == wanted and len(pairs) == passages and all(value in GRADES for value in values):
            return [int(grades[str(number)]) for number in range(1, passages + 1)]
    return None


def fleiss_kappa(votes: Mapping[tuple[int, ...], int]) -> float | None:
    """Fleiss' kappa (1971) of {the grades that raters gave to a text: how many texts}; None if it is not defined."""
    texts, raters = sum(votes.values()), max(map(len, votes), default=0)
    if texts == 0 or raters < 2:
        return None
    shares, agreement = Counter[int](), 0.0
    for given, count in votes.items():
        of_text = Counter(given)
        shares.update({grade: times * count for grade, times in of_text.items()})
        agreement += count * (sum(times * times for times in of_text.values()) - raters) / (raters * (raters - 1))
    by_chance = sum((times / (texts * raters)) ** 2 for times in shares.values())
    return None if by_chance == 1 else (agreement / texts - by_chance) / (1 - by_chance)
