"""Runs systems over tasks and puts what they answer into figures and, query by query, into results. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.evaluation.metrics import Values, correlations, mean_percent, ranked
from models.evaluation.results import GOLD_SCORE, POSITIVE_COSINE, SIMILARITY, Hit, QueryResult, SetResult
from models.evaluation.sets import METRICS, Kind, PairSet, RerankSet, RetrievalSet, Task
from models.evaluation.systems import Answers, Dense, NotApplicable, System

HITS, GOLD, TEXT_CHARACTERS = 10, 3, 120
"""How many hits and known answers are kept of a query, and how much of their texts."""
TIMED_QUERIES, WARM_UP_QUERIES = 50, 3


@dataclass(frozen=True, slots=True)
class Judgement:
    """The results in the order of the tasks, and why a system has none for some sets: {system: {reason: sets}}."""

    results: list[SetResult] = field(default_factory=list)
    not_applicable: dict[str, dict[str, list[str]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Query:
    """A query and what it is asked of, by row: the corpus, or its own candidates."""

    id: str
    text: str
    ids: Sequence[str]
    texts: Sequence[str]
    grades: Mapping[int, int]

    def hit(self, row: int) -> Hit:
        return Hit(self.ids[row], self.texts[row][:TEXT_CHARACTERS], self.grades.get(row, 0))


def judge(
    tasks: Iterable[Task],
    systems: Sequence[System],
    report: Callable[[Sequence[SetResult]], object] = lambda results: None,
    *,
    speed: bool = False,
) -> Judgement:
    """Every task by every system; `report` is told the results of each set when it is through."""
    judgement = Judgement()
    for task in tasks:
        of_set: list[SetResult] = []
        for system in systems:
            try:
                of_set.append(judge_one(task, system, speed=speed))
            except NotApplicable as reason:
                reasons = judgement.not_applicable.setdefault(system.facts.name, {})
                reasons.setdefault(str(reason), []).append(task.name)
        judgement.results.extend(of_set)
        report(of_set)
    return judgement


def judge_one(task: Task, system: System, *, speed: bool = False) -> SetResult:
    """One task by one system; raises NotApplicable."""
    metrics, queries = figures(task, system.answer(task))
    if isinstance(system, Dense) and isinstance(task.data, RetrievalSet) and task.kind is Kind.RETRIEVAL:
        cosines = system.positive_cosines(task, task.data)
        metrics[POSITIVE_COSINE] = mean_percent(np.array(cosines))
        for query, cosine in zip(queries, cosines, strict=True):
            query.metrics[POSITIVE_COSINE] = cosine
    rate = None
    if speed and isinstance(task.data, RetrievalSet):
        rate = queries_per_second(system.online(task, task.data), task.data.queries)
    name = system.facts.name
    return SetResult(task.benchmark, task.name, task.kind, name, task.main_metric, metrics, queries, rate)


def figures(task: Task, answers: Answers) -> tuple[dict[str, float], list[QueryResult]]:
    """The figures of a set in percent, and what lies behind them."""
    if isinstance(task.data, PairSet):
        assert isinstance(answers, np.ndarray)
        return _of_pairs(task.data, answers)
    assert isinstance(answers, list)
    queries = list(_queries(task.data))
    relevant = task.data.relevant if isinstance(task.data, RerankSet) else 1
    rankings = [rows for rows, _ in answers]
    values = ranked([query.grades for query in queries], rankings, METRICS[task.kind], relevant)
    means = {name: mean_percent(of_queries) for name, of_queries in values.items()}
    return means, [_result(query, rankings[place], values, place) for place, query in enumerate(queries)]


def queries_per_second(answer: Callable[[str], object], queries: Sequence[str]) -> float:
    """One query at a time, over queries spread through the set, by the wall clock; other work on the machine counts."""
    step = max(1, len(queries) // TIMED_QUERIES)
    sample = queries[::step][:TIMED_QUERIES]
    for query in sample[:WARM_UP_QUERIES]:
        answer(query)
    began = time.perf_counter()
    for query in sample:
        answer(query)
    return len(sample) / (time.perf_counter() - began)


def _of_pairs(data: PairSet, cosines: NDArray[np.float32]) -> tuple[dict[str, float], list[QueryResult]]:
    pairs = [
        QueryResult(str(place), "\n".join(pair), {SIMILARITY: cosine, GOLD_SCORE: score})
        for place, (pair, cosine, score) in enumerate(zip(data.pairs, cosines.tolist(), data.scores, strict=True), 1)
    ]
    return {name: 100 * value for name, value in correlations(cosines, data.scores).items()}, pairs


def _queries(data: RetrievalSet | RerankSet) -> Iterator[_Query]:
    if isinstance(data, RetrievalSet):
        row_of = {id: row for row, id in enumerate(data.document_ids)}
        for id, text in zip(data.query_ids, data.queries, strict=True):
            grades = {row_of[document]: grade for document, grade in data.qrels[id].items()}
            yield _Query(id, text, data.document_ids, data.documents, grades)
        return
    for number, (text, candidates) in enumerate(zip(data.queries, data.candidates, strict=True), start=1):
        ids = [str(place) for place in range(1, len(candidates) + 1)]
        grades = {place: grade for place, (_, grade) in enumerate(candidates)}
        yield _Query(str(number), text, ids, [candidate for candidate, _ in candidates], grades)


def _result(query: _Query, rows: NDArray[np.int64], values: Mapping[str, Values], place: int) -> QueryResult:
    answers = sorted((row for row, grade in query.grades.items() if grade > 0), key=lambda row: -query.grades[row])
    return QueryResult(
        id=query.id,
        text=query.text,
        metrics={name: float(of_queries[place]) for name, of_queries in values.items()},
        hits=[query.hit(row) for row in rows[:HITS].tolist()],
        gold=[query.hit(row) for row in answers[:GOLD]],
    )
