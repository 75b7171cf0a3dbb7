"""Judges the passages of training rows by several language models and keeps those on which all agree."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from models.curation.frame import Outcome, Step, Tally, digest
from models.curation.panel import GRADES, Answers, Judge, Limits, Panel, Verdict
from models.curation.rows import Row, is_document, passages_of, query_of
from models.errors import CareError

PROMPTS = Path(__file__).parent / "prompts"
LANGUAGES = {"zh": "段落 {number}：{text}", "en": "Passage {number}: {text}"}
BATCH, RELEVANT, IRRELEVANT = 10, 3, 2
PASSAGE_CHARACTERS = 2000
VOTES = "votes "
JUDGED = "judged"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A row whose passages are being judged: batches of their texts, with the verdicts to come."""

    row: Row
    batches: Sequence[tuple[str, Sequence[str], Sequence[Future[Verdict]]]]


@dataclass(frozen=True)
class JudgeRows(Step):
    """Positives of the output: all judges gave `relevant` or more; negatives: all gave `irrelevant` or less."""

    judges: Sequence[Judge]
    answers: Path
    language: str = "zh"
    batch: int = BATCH
    relevant: int = RELEVANT
    irrelevant: int = IRRELEVANT
    limits: Limits = Limits()  # noqa: RUF009 - frozen

    name = "judge"

    def __post_init__(self) -> None:
        if len({judge.model for judge in self.judges}) < len(self.judges):
            raise CareError("--judge: a model is named twice; a panel needs different models")
        if not 0 <= self.irrelevant < self.relevant <= max(GRADES):
            raise CareError("--irrelevant must be below --relevant, and both between 0 and 4")

    @cached_property
    def prompt(self) -> str:
        return (PROMPTS / f"judge.{self.language}.txt").read_text(encoding="utf-8")

    def parameters(self) -> dict[str, Any]:
        return {"judges": [judge.model for judge in self.judges], "prompt": digest(self.prompt), "batch": self.batch,
                "relevant": self.relevant, "irrelevant": self.irrelevant, "max_tokens": self.limits.max_tokens,
                "characters": PASSAGE_CHARACTERS}  # fmt: skip

    def provenance(self) -> dict[str, Any]:
        models = [judge.model for judge in self.judges]
        return {**super().provenance(), "prompt": digest(self.prompt), "judges": models}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        panel = Panel(self.judges, Answers(self.answers), self.limits)
        waiting: deque[_Asked] = deque()
        try:
            for row in rows:
                waiting.append(self._ask(row, panel))
                if len(waiting) > 2 * self.limits.at_once:
                    yield self._decide(waiting.popleft(), panel)
            while waiting:
                yield self._decide(waiting.popleft(), panel)
        finally:
            panel.close()

    def _ask(self, row: Row, panel: Panel) -> _Asked:
        query, batches = query_of(row), []
        # By their hashes: neither positives first, nor another order in another run.
        texts = sorted({*passages_of(row), *row.get("neg", [])}, key=digest) if query else []
        for first in range(0, len(texts), self.batch):
            some = texts[first : first + self.batch]
            shown = [
                LANGUAGES[self.language].format(number=number, text=" ".join(text[:PASSAGE_CHARACTERS].split()))
                for number, text in enumerate(some, start=1)
            ]
            before, _, after = self.prompt.partition("{passages}")
            prompt = before.replace("{query}", query) + "\n\n".join(shown) + after
            batches.append((prompt, some, panel.submit(prompt, self.language, len(some))))
        return _Asked(row, batches)

    def _decide(self, asked: _Asked, panel: Panel) -> Outcome:
        row, grades, notes = asked.row, dict[str, list[int]](), Counter[str]()
        if not asked.batches:
            return Outcome(dropped="a document without a title: there is no query to judge it by")
        for prompt, texts, futures in asked.batches:
            verdicts = [future.result() for future in futures]
            panel.forget(prompt)
            for judge, verdict in zip(self.judges, verdicts, strict=True):
                notes[f"requests to {judge.model}"] += verdict.requests
                notes[f"prompt tokens of {judge.model}"] += verdict.prompt_tokens
                notes[f"completion tokens of {judge.model}"] += verdict.completion_tokens
            given = [verdict.grades for verdict in verdicts if verdict.grades is not None]
            if len(given) == len(verdicts):
                grades.update(zip(texts, map(list, zip(*given, strict=True)), strict=True))
            else:
                notes["passages without a grade of every judge"] += len(texts)
        return self._outcome(row, grades, notes)

    def _outcome(self, row: Row, grades: Mapping[str, list[int]], notes: Counter[str]) -> Outcome:
        notes.update(VOTES + " ".join(map(str, votes)) for votes in grades.values())
        relevant = [text for text, votes in grades.items() if min(votes) >= self.relevant]
        irrelevant = [text for text, votes in grades.items() if max(votes) <= self.irrelevant]
        disputed = [text for text in grades if text not in relevant and text not in irrelevant]
        old = {"positives": passages_of(row), "negatives": row.get("neg", [])}
        notes["positives kept"] += len(set(relevant) & set(old["positives"]))
        notes["negatives that are relevant"] += len(set(relevant) & set(old["negatives"]))
        notes["positives that are irrelevant"] += len(set(irrelevant) & set(old["positives"]))
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
        return Outcome([{**row, "pos": pos, "neg": neg, JUDGED: judged}], **made)

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
        for one, other in combinations(range(len(self.judges)), 2):
            same = sum(count for given, count in votes.items() if given[one] == given[other])
            pairs[f"{self.judges[one].model} and {self.judges[other].model}"] = same / total if total else None
        agreement = {"passages": total, "kappa_grades": fleiss_kappa(votes), "kappa_relevant": fleiss_kappa(relevant)}
        return {"agreement": {**agreement, "same_grade": pairs}}


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
