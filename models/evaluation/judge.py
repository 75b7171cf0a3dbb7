"""Runs systems over evaluation sets and makes the table. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.evaluation.metrics import average_precision, ndcg, pearson
from models.evaluation.sets import PairSet, RerankSet, RetrievalSet, find_sets, load_pairs, load_rerank, load_retrieval
from models.evaluation.systems import Encoder, System
from models.spec import Side


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the table, in percent."""

    set_name: str
    metric: str
    system: str
    value: float


def judge_retrieval(data: RetrievalSet, system: System) -> float:
    """Mean nDCG@10 in percent."""
    rankings = system.rank(data.documents, data.queries)
    values = [
        ndcg(data.qrels[query], [data.document_ids[row] for row in rows[:10]])
        for query, (rows, _) in zip(data.query_ids, rankings, strict=True)
    ]
    return 100 * float(np.mean(values))


def judge_rerank(data: RerankSet, encoder: Encoder) -> float:
    """Mean average precision of the first ten in percent; grade 2 is relevant, order by cosine."""
    values = []
    for query, candidates in zip(data.queries, data.candidates, strict=True):
        vectors = encoder.encode([text for text, _ in candidates], Side.DOCUMENT)
        scores = vectors @ encoder.encode([query], Side.QUERY)[0]
        order = np.argsort(-scores, kind="stable")
        values.append(average_precision([candidates[row][1] >= 2 for row in order]))
    return 100 * float(np.mean(values))


def judge_pairs(data: PairSet, encoder: Encoder) -> float:
    """Pearson's correlation of cosine and given score, in percent."""
    first = encoder.encode([a for a, _ in data.pairs], Side.QUERY)
    second = encoder.encode([b for _, b in data.pairs], Side.QUERY)
    return 100 * pearson((first * second).sum(1).tolist(), data.scores)


def judge_all(
    root: Path,
    systems: Mapping[str, System],
    encoders: Mapping[str, Encoder],
    report: Callable[[Figure], None] = lambda figure: None,
) -> list[Figure]:
    """Every set below the folder: retrieval by each system, reranking and pairs by each encoder."""
    retrieval, rerank, pairs = find_sets(root)
    figures: list[Figure] = []

    def add(figure: Figure) -> None:
        figures.append(figure)
        report(figure)

    for folder in retrieval:
        data = load_retrieval(folder)
        for name, system in systems.items():
            add(Figure(data.name, "nDCG@10", name, judge_retrieval(data, system)))
    for path in rerank:
        lists = load_rerank(path)
        for name, encoder in encoders.items():
            add(Figure(lists.name, "MAP@10", name, judge_rerank(lists, encoder)))
    for path in pairs:
        sentences = load_pairs(path)
        for name, encoder in encoders.items():
            add(Figure(sentences.name, "Pearson", name, judge_pairs(sentences, encoder)))
    return figures


def table(figures: list[Figure]) -> str:
    """The figures as a Markdown table, a row a set, a column a system."""
    systems = list(dict.fromkeys(figure.system for figure in figures))
    values = {(f.set_name, f.metric, f.system): f.value for f in figures}
    lines = [f"| set | metric | {' | '.join(systems)} |", "|---|---|" + "---:|" * len(systems)]
    for name, metric in dict.fromkeys((f.set_name, f.metric) for f in figures):
        cells = [f"{values[name, metric, s]:.2f}" if (name, metric, s) in values else "" for s in systems]
        lines.append(f"| {name} | {metric} | {' | '.join(cells)} |")
    return "\n".join(lines)
