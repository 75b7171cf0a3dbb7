"""Makes a benchmark of judged rows: retrieval, reranking and sentence pairs as `care eval` reads them, with a card."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from models.curation.frame import Outcome, Step, digest, read_json
from models.curation.judge import DISPUTED, JUDGED
from models.curation.match import are
from models.curation.rows import Row, read_rows
from models.curation.search import Corpus
from models.errors import CareError
from models.evaluation.sets import order, write_retrieval
from models.rows import write_lines

CANDIDATES = 30
"""Passages of a reranking list at most."""
CARD = "card.md"
PARTS = ("retrieval", "rerank", "sts", CARD)
"""All that a folder of a benchmark holds."""


@dataclass(frozen=True)
class Benchmark(Step):
    """Rows that `judge` kept in, the same rows out; `folder` gets the sets and the card.

    The corpus is `corpus` without passages on which judges disagreed: they would count as wrong answers.
    """

    files: Sequence[Path]
    corpus: Sequence[Path]
    folder: Path
    sts: Sequence[Path] = ()
    """Rows of `synthesize --kind synonym`."""

    name = "benchmark"

    def __post_init__(self) -> None:
        there = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        if others := [name for name in there if name not in PARTS]:
            raise CareError(f"{self.folder} holds {others[0]}, and would be replaced; give another --folder")

    def parameters(self) -> dict[str, Any]:
        sts = [digest(row) for row in read_rows(self.sts)]
        return {"corpus": self._corpus.digest, "sts": digest(sts), "candidates": CANDIDATES}

    @cached_property
    def _corpus(self) -> Corpus:
        return Corpus.load(self.corpus)

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        known = self._corpus.rows
        for row in rows:
            if JUDGED not in row or "query" not in row or not are(str)(row.get(DISPUTED, [])):
                yield Outcome(dropped="not a query with judged passages: the judge step makes them")
            elif not all(text in known for text in row["pos"]):
                yield Outcome(dropped="a positive that the corpus does not have")
            else:
                yield Outcome([row])

    def finish(self, out: Path) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        answers, negatives, disputed = dict[str, set[str]](), dict[str, list[str]](), set[str]()
        for row in read_rows([out]):
            assert row is not None
            answers.setdefault(row["query"], set()).update(row["pos"])
            negatives.setdefault(row["query"], []).extend(row.get("neg", []))
            disputed.update(row.get(DISPUTED, []))
        positive = {text for texts in answers.values() for text in texts}
        documents = [text for text in self._corpus.texts if text in positive or text not in disputed]
        write_retrieval(self.folder / "retrieval", documents, answers.items())
        lists = [_reranking(query, answers[query], negatives[query]) for query in answers]
        lists = [each for each in lists if len({candidate["grade"] for candidate in each["candidates"]}) > 1]
        pairs = [_pair(row) for row in read_rows(self.sts) if row and "query" in row and row.get("neg")]
        for name, lines in (("rerank", lists), ("sts", pairs)):
            if lines:
                (self.folder / name).mkdir()
                write_lines(self.folder / name / f"{self.folder.name}.jsonl", lines)
        card = self._card(answers, documents, lists, pairs, len(self._corpus.texts) - len(documents))
        (self.folder / CARD).write_text(card, encoding="utf-8")

    def _card(
        self, answers: Mapping[str, set[str]], documents: Sequence[str], lists: Sequence[Row], pairs: Sequence[Row],
        left_out: int,
    ) -> str:  # fmt: skip
        """Returns statistics with the columns of CARE's table 7, and the judges' agreement."""
        head = "| task | queries | characters a query | documents | characters a document | positives a query |"
        shown = [
            _line("retrieval", list(answers), len(documents), documents, [len(texts) for texts in answers.values()])
        ]
        if lists:
            texts = [[candidate["text"] for candidate in each["candidates"]] for each in lists]
            positives = [sum(candidate["grade"] > 1 for candidate in each["candidates"]) for each in lists]
            queries = [each["query"] for each in lists]
            shown.append(
                _line("rerank", queries, mean(map(len, texts)), [t for some in texts for t in some], positives)
            )
        if pairs:
            same = sum(pair["score"] for pair in pairs) / len(pairs)
            shown.append(
                f"| sts | {len(pairs):,} | {mean(len(pair['a']) for pair in pairs):.1f} | – | – | {same:.1%} same |"
            )
        reports = (read_json(file.with_name(f"{file.name}.report.json")) for file in self.files)
        judged = [line for report in reports if (line := _quality(report))]
        quality = judged or ["- no report of the judge step lies beside the input"]
        left = f"- {left_out:,} documents on which judges disagreed were left out of the corpus"
        return "\n".join(
            [f"# {self.folder.name}", "", head, "|---|---:|---:|---:|---:|---:|", *shown, "", *quality, left, ""]
        )


def _line(task: str, queries: Sequence[str], count: float, documents: Sequence[str], positives: Sequence[int]) -> str:
    lengths = (mean(map(len, queries)), mean(map(len, documents))) if queries else (0.0, 0.0)
    found = f"{mean(positives):.2f}" if positives else "–"
    return f"| {task} | {len(queries):,} | {lengths[0]:.1f} | {count:,.1f} | {lengths[1]:.1f} | {found} |".replace(
        ".0 |", " |"
    )


def _reranking(query: str, positives: set[str], negatives: Sequence[str]) -> Row:
    """Positives and negatives mixed, all positives but no more than half of the list if there are enough negatives."""
    wrong = sorted(set(negatives) - positives, key=order)
    right = sorted(positives, key=order)[: max(CANDIDATES // 2, CANDIDATES - len(wrong))]
    grades = dict.fromkeys(right, 2) | dict.fromkeys(wrong[: CANDIDATES - len(right)], 0)
    return {"query": query, "candidates": [{"text": text, "grade": grades[text]} for text in sorted(grades, key=order)]}


def _pair(row: Row) -> Row:
    """The query with the synonym's sentence, or as often with one of the negatives (CARE's table 7: 48 % positive)."""
    query, same = row["query"], order(row["query"])[0] % 2
    text = row["pos"][0] if same else min(row["neg"], key=lambda negative: order(query + negative))
    return {"a": query, "b": text, "score": same}


def _quality(report: Mapping[str, Any]) -> str:
    """Returns a line with the judges of a report and their agreement; empty without such a report."""
    try:
        *names, last = report["run"]["parameters"]["models"]
        agreement = report["agreement"]
        panel = f"{', '.join(names)} and {last}" if names else last
        grades, relevant = _figure(agreement["kappa_grades"]), _figure(agreement["kappa_relevant"])
        count = f"{agreement['passages']:,} passages"
    except (LookupError, TypeError, ValueError):
        return ""
    return f"- {panel}: {count}, Fleiss' kappa {grades} on grades and {relevant} on relevant or not"


def _figure(kappa: float | None) -> str:
    return "not defined" if kappa is None else f"{kappa:.3f}"
