"""Runs systems over tasks and computes metrics by ranx and scipy, per set and per query.

nDCG uses the grade as gain. Recall and average precision, at every depth, divide by the number R of all relevant
documents, as trec_eval, BEIR and mteb do. An empty ranking scores 0. ranx and scipy take seconds to import, so the
functions import them.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from models.errors import CareError
from models.evaluation.results import GOLD_SCORE, POSITIVE_COSINE, SIMILARITY, Hit, QueryResult, SetResult, SystemFacts
from models.evaluation.sets import METRICS, Kind, PairSet, RerankSet, RetrievalSet, Task
from models.evaluation.systems import Answers, Dense, NotApplicable, System

Values = NDArray[np.float64]

HITS, GOLD, TEXT_CHARACTERS = 10, 3, 120
"""How many hits and known answers are kept of a query, and how much of their texts."""
TIMED_QUERIES, WARM_UP_QUERIES = 50, 3
NEEDED = ("ranx", "scipy")
_NAME = re.compile(r"(\w+)(@\d+)?")
_RANX = {"nDCG": "ndcg", "Recall": "recall", "MRR": "mrr", "Acc": "hit_rate", "MAP": "map"}


def check_libraries(*more: str) -> None:
    """Raises CareError before any work if a library is missing."""
    if lacking := [name for name in (*NEEDED, *more) if find_spec(name) is None]:
        raise CareError(f"needs {', '.join(lacking)}: pip install 'care-search[eval]' (make eval has them)")


def ranked(
    grades: Sequence[Mapping[int, int]], rankings: Sequence[NDArray[np.int64]], names: Sequence[str], relevant: int = 1
) -> dict[str, Values]:
    """Compute each metric of each query, between 0 and 1: {name: (queries,)}.

    `grades` and `rankings` name documents by row; a ranking is in its final order, best first. Documents are relevant
    from the grade `relevant` on, except for nDCG. A name without a depth ("MAP") covers the whole ranking.
    """
    import ranx  # type: ignore[import-untyped]

    run = _array([[(row, -place) for place, row in enumerate(rows.tolist())] for rows in rankings])
    qrels = _array([sorted(of_query.items(), key=lambda pair: -pair[1]) for of_query in grades])
    asked: dict[str, str] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in _RANX:
            raise ValueError(f"no metric is called {name!r}")
        # ranx takes grades below the level for 0; nDCG has no level: every grade is a gain.
        level = "" if match[1] == "nDCG" else f"-l{relevant}"
        asked[name] = f"{_RANX[match[1]]}{match[2] or ''}{level}"
    # Asked for one metric alone, ranx looks its result up under another name; the last one is never read.
    with warnings.catch_warnings():
        # numba compiles the metrics at the first call and warns of casts of array sizes.
        warnings.simplefilter("ignore")
        values = ranx.evaluate(qrels, run, [*asked.values(), "hits@1"], return_mean=False)
    return {name: values[theirs] for name, theirs in asked.items()}


def _array(lists: Sequence[Sequence[tuple[int, int]]]) -> Values:
    """(queries, longest, 2) of rows and values; short lists end in row -1, which no document has, of grade 0."""
    array = np.zeros((len(lists), max([1, *map(len, lists)]), 2))
    array[:, :, 0] = -1.0
    for place, pairs in enumerate(lists):
        if pairs:
            array[place, : len(pairs)] = pairs
    return array


def mean_percent(values: Values) -> float:
    return 100 * float(np.mean(values))


def correlations(similarities: Sequence[float] | NDArray[np.float32], scores: Sequence[float]) -> dict[str, float]:
    """Pearson's and Spearman's correlation, between -1 and 1; 0 if every similarity is the same."""
    from scipy import stats  # type: ignore[import-untyped]

    first, second = np.asarray(similarities, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return {"Pearson": 0.0, "Spearman": 0.0}
    pearson, spearman = stats.pearsonr(first, second), stats.spearmanr(first, second)
    return {"Pearson": float(pearson.statistic), "Spearman": float(spearman.statistic)}


@dataclass(frozen=True, slots=True)
class Judgement:
    """The results in the order of the tasks, and why a system has none for some sets: {system: {reason: sets}}."""

    results: list[SetResult] = field(default_factory=list)
    not_applicable: dict[str, dict[str, list[str]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Query:
    """A query, and what it searches by row: the corpus, or its own candidates."""

    id: str
    text: str
    ids: Sequence[str]
    texts: Sequence[str]
    grades: Mapping[int, int]

    def result(self, metrics: dict[str, float], rows: Sequence[int]) -> QueryResult:
        answers = sorted((row for row, grade in self.grades.items() if grade > 0), key=lambda row: -self.grades[row])
        hits, gold = (
            [Hit(self.ids[row], self.texts[row][:TEXT_CHARACTERS], self.grades.get(row, 0)) for row in of_query]
            for of_query in (rows[:HITS], answers[:GOLD])
        )
        return QueryResult(self.id, self.text, metrics, hits, gold)


def judge(
    tasks: Iterable[Task],
    systems: Sequence[System],
    report: Callable[[Sequence[SetResult]], object] = lambda results: None,
    *,
    speed: bool = False,
) -> Judgement:
    """Judges every system on every task; calls `report` with the results of each set when it is done."""
    judgement = Judgement()
    for task in tasks:
        of_set: list[SetResult] = []
        for system in systems:
            try:
                of_set.append(judge_one(task, system, speed=speed))
            except NotApplicable as reason:
                reasons = judgement.not_applicable.setdefault(system.facts.name, {})
                reasons.setdefault(str(reason), []).append(task.name)
        of_set += _means(of_set, [system.facts for system in systems])
        judgement.results.extend(of_set)
        report(of_set)
    return judgement


def mean_systems(systems: Sequence[SystemFacts]) -> list[SystemFacts]:
    """Returns one system, the mean, for each group of systems that differ only by a seed."""
    means = {facts.repeats: replace(facts, name=facts.repeats, repeats="") for facts in systems if facts.repeats}
    return list(means.values())


def _means(of_set: Sequence[SetResult], systems: Sequence[SystemFacts]) -> Iterator[SetResult]:
    """Yields the means over seeds, of figures and of every query's metrics; a mean has no ranking."""
    for mean in mean_systems(systems):
        names = [facts.name for facts in systems if facts.repeats == mean.name]
        found = [result for result in of_set if result.system in names]
        if found:
            queries = [
                replace(same[0], metrics=_mean([each.metrics for each in same]), hits=[])
                for same in zip(*(result.queries for result in found), strict=True)
            ]
            metrics = _mean([result.metrics for result in found])
            yield replace(found[0], system=mean.name, metrics=metrics, queries=queries, queries_per_second=None)


def _mean(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([each[name] for each in metrics])) for name in metrics[0]}


def judge_one(task: Task, system: System, *, speed: bool = False) -> SetResult:
    """Judges one system on one task; raises NotApplicable."""
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
    """Returns the figures of a set in percent, and the result of each query or sentence pair."""
    data = task.data
    if isinstance(data, PairSet):
        assert isinstance(answers, np.ndarray)
        rows = zip(data.pairs, answers.tolist(), data.scores, strict=True)
        pairs = [
            QueryResult(str(place), "\n".join(pair), {SIMILARITY: cosine, GOLD_SCORE: score})
            for place, (pair, cosine, score) in enumerate(rows, 1)
        ]
        return {name: 100 * value for name, value in correlations(answers, data.scores).items()}, pairs
    assert isinstance(answers, list)
    queries = list(_queries(data))
    relevant = data.relevant if isinstance(data, RerankSet) else 1
    rankings = [rows for rows, _ in answers]
    values = ranked([query.grades for query in queries], rankings, METRICS[task.kind], relevant)
    results = [
        query.result({name: float(of_queries[place]) for name, of_queries in values.items()}, rankings[place].tolist())
        for place, query in enumerate(queries)
    ]
    return {name: mean_percent(of_queries) for name, of_queries in values.items()}, results


def _queries(data: RetrievalSet | RerankSet) -> Iterator[_Query]:
    if isinstance(data, RetrievalSet):
        for id, text, grades in zip(data.query_ids, data.queries, data.grades(), strict=True):
            yield _Query(id, text, data.document_ids, data.documents, grades)
        return
    for number, (text, candidates) in enumerate(zip(data.queries, data.candidates, strict=True), start=1):
        ids = [str(place) for place in range(1, len(candidates) + 1)]
        grades = {place: grade for place, (_, grade) in enumerate(candidates)}
        yield _Query(str(number), text, ids, [candidate for candidate, _ in candidates], grades)


def queries_per_second(answer: Callable[[str], object], queries: Sequence[str]) -> float:
    """Times one query at a time, spread through the set, by the wall clock; other work on the machine counts."""
    sample = queries[:: max(1, len(queries) // TIMED_QUERIES)][:TIMED_QUERIES]
    for query in sample[:WARM_UP_QUERIES]:
        answer(query)
    began = time.perf_counter()
    for query in sample:
        answer(query)
    return len(sample) / (time.perf_counter() - began)
