"""Tests whether a difference between two systems is more than chance, on one set and on averages of sets.

The test is a paired bootstrap: the queries of a set are drawn again with replacement, the same draw for every system,
and the observed difference is compared with the spread of the drawn differences. An average over sets (macro-average)
draws the queries of every set, each with its own seed, and averages the differences. Sentence pairs have no value of
their own, so their correlation is computed for each draw (Spearman's on the ranks of the whole set).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.errors import BadData
from models.evaluation.results import GOLD_SCORE, SIMILARITY, Run, SetResult
from models.evaluation.sets import Kind

RESAMPLES = 10_000
SEED = 20_000
ALPHA = 0.05
MIN_QUERIES = 20
"""Draws from fewer queries than this repeat each other so often that their spread says little."""
DRAWN_AT_ONCE = 2_000_000
# Values are sums of a few reciprocals, so many draws tie with the observed difference but for their rounding.
ROUNDING = 1e-9

Values = NDArray[np.float64]
Statistic = Callable[[Values], Values]
"""How often each draw holds each query, (draws, queries), to the set's figure in each draw, (draws,)."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The difference between a system and a baseline, on a set or an average of sets, in percent points."""

    baseline: str
    difference: float
    low: float
    high: float
    """The middle 95 % of the draws lie between `low` and `high`."""
    p: float | None
    """How often chance alone would show such a difference; None where the queries are too few to tell."""

    @property
    def symbol(self) -> str:
        """↑ for better, ↓ for worse, nothing where chance may be the reason."""
        if self.p is None or self.p >= ALPHA:
            return ""
        return "↑" if self.difference > 0 else "↓"


Key = tuple[str, tuple[str, ...], str]
"""Benchmark, sets (one, or those of an average) and system."""
Marks = dict[Key, Mark]


def compare(run: Run, baseline: str) -> Marks:
    """Compare every system with the baseline, on each set and on each average of sets that both have.

    The marks of a benchmark are one table and are read together, so its p values are corrected by Holm's method: with
    twenty true ties in a table, uncorrected marks would show one difference that does not exist.
    """
    benchmarks: dict[str, list[SetResult]] = defaultdict(list)
    for result in run.results:
        benchmarks[result.benchmark].append(result)
    found: Marks = {}
    for benchmark, results in benchmarks.items():
        marks = {(benchmark, *key): mark for key, mark in _table_marks(results, baseline)}
        found |= _holm(marks)
    return found


def averages(results: Iterable[SetResult]) -> list[tuple[str, ...]]:
    """The sets of each average of a table: of every kind that has several sets, then of all kinds."""
    kinds: dict[Kind, dict[str, None]] = defaultdict(dict)
    for result in results:
        kinds[result.kind][result.set_name] = None
    groups = [tuple(names) for names in kinds.values() if len(names) > 1]
    return groups + [tuple(name for names in kinds.values() for name in names)] * (len(kinds) > 1)


def paired(results: Sequence[SetResult], baseline: SetResult) -> list[Mark]:
    """One mark for each result of the baseline's set, not corrected for the number of comparisons."""
    return [_mark(baseline.system, *drawn) for drawn in zip(*_drawn(results, baseline), strict=True)]


def _table_marks(results: Sequence[SetResult], baseline: str) -> Iterator[tuple[tuple[tuple[str, ...], str], Mark]]:
    """The marks of one benchmark, not corrected: of its sets, then of its averages."""
    found = {(result.set_name, result.system): result for result in results}
    sets = [name for name in dict.fromkeys(result.set_name for result in results) if (name, baseline) in found]
    drawn: dict[tuple[str, str], tuple[Values, Values]] = {}
    for place, name in enumerate(sets):
        others = [result for result in results if result.set_name == name and result.system != baseline]
        for result, *of_result in zip(others, *_drawn(others, found[name, baseline], place), strict=True):
            drawn[name, result.system] = (of_result[0], of_result[1])
    systems = dict.fromkeys(system for _, system in drawn)
    for group in [*((name,) for name in sets), *averages(results)]:
        for system in systems:
            parts = [drawn[name, system] for name in group if (name, system) in drawn]
            if len(parts) == len(group):
                observed, draws = (np.mean([part[at] for part in parts], axis=0) for at in (0, 1))
                yield (group, system), _mark(baseline, observed, draws)


def _drawn(results: Sequence[SetResult], baseline: SetResult, stream: int = 0) -> tuple[Values, Values]:
    """Observed differences (results,) and those of the draws (results, RESAMPLES): NaN if there are too few queries.

    `stream` chooses the draws: two sets of one size in an average must not be drawn alike.
    """
    for result in results:
        _check_same_queries(result, baseline)
    queries = len(baseline.queries)
    statistics = [_statistic(result) for result in (baseline, *results)]
    observed = _differences(statistics, np.ones((1, queries)))[:, 0]
    if queries < MIN_QUERIES:
        return observed, np.full((len(results), RESAMPLES), np.nan)
    return observed, np.concatenate([_differences(statistics, counts) for counts in _draws(queries, stream)], axis=1)


def _mark(baseline: str, observed: Values, drawn: Values) -> Mark:
    difference = float(observed)
    if np.isnan(drawn).any():
        return Mark(baseline, 100 * difference, 100 * difference, 100 * difference, None)
    strayed = np.abs(drawn - difference) >= abs(difference) - ROUNDING
    low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
    return Mark(baseline, 100 * difference, 100 * low, 100 * high, (1 + int(strayed.sum())) / (1 + RESAMPLES))


def per_query(result: SetResult) -> Values:
    """What each query adds to the set's figure, (queries,): their mean is the figure, between −1 and 1.

    A sentence pair adds the product of its two standardised values, whose mean is the correlation.
    """
    if result.kind is not Kind.STS:
        return _values(result, result.main_metric)
    similarity, gold = _pairs(result)
    return _standardised(similarity) * _standardised(gold)


def _check_same_queries(result: SetResult, baseline: SetResult) -> None:
    if result.main_metric != baseline.main_metric:
        raise BadData(
            f"{result.set_name}: judged by {result.main_metric} for {result.system} and by {baseline.main_metric} for"
            f" {baseline.system}; judge both by one metric"
        )
    ours, theirs = ([(query.id, query.text) for query in each.queries] for each in (result, baseline))
    if ours != theirs:
        differing = len(set(ours) ^ set(theirs))
        raise BadData(
            f"{result.set_name}: {result.system} and {baseline.system} were not asked the same queries"
            f" ({differing} differ); judge both on the same data"
        )


def _draws(queries: int, stream: int) -> Iterator[Values]:
    """How often each query was drawn: blocks (draws, queries), the same ones at every call of a stream."""
    generator = np.random.default_rng([SEED, stream] if stream else SEED)
    block = max(1, DRAWN_AT_ONCE // queries)
    for start in range(0, RESAMPLES, block):
        draws = min(block, RESAMPLES - start)
        drawn = generator.integers(0, queries, size=(draws, queries), dtype=np.int64)
        drawn += queries * np.arange(draws)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=draws * queries)
        yield counts.reshape(draws, queries).astype(np.float64)


def _differences(statistics: Sequence[Statistic], counts: Values) -> Values:
    """(systems, draws): what each system's figure lies above the first one's."""
    baseline, *others = (statistic(counts) for statistic in statistics)
    return np.array([other - baseline for other in others]).reshape(len(others), len(counts))


def _statistic(result: SetResult) -> Statistic:
    if result.kind is not Kind.STS:
        values = _values(result, result.main_metric)
        return lambda counts: counts @ values / len(values)
    return _correlation(*_pairs(result))


def _pairs(result: SetResult) -> tuple[Values, Values]:
    """Similarities and given scores, or their ranks, of which Pearson's correlation is the set's main metric."""
    similarity, gold = _values(result, SIMILARITY), _values(result, GOLD_SCORE)
    return (_ranks(similarity), _ranks(gold)) if result.main_metric == "Spearman" else (similarity, gold)


def _values(result: SetResult, name: str) -> Values:
    try:
        return np.array([query.metrics[name] for query in result.queries])
    except KeyError as error:
        raise BadData(f"{result.set_name}: {result.system} keeps no {name} by query; run care eval again") from error


def _correlation(first: Values, second: Values) -> Statistic:
    """Pearson's correlation in each draw, from sums over the drawn pairs; 0 where all values of a draw are alike."""
    # Standardised before, so that the differences of sums below lose no digits.
    x, y = _standardised(first), _standardised(second)
    columns = np.column_stack((x, y, x * x, y * y, x * y))

    def statistic(counts: Values) -> Values:
        mean_x, mean_y, xx, yy, xy = (counts @ columns / len(x)).T
        variances = (xx - mean_x**2) * (yy - mean_y**2)
        spread = variances > ROUNDING
        return np.where(spread, (xy - mean_x * mean_y) / np.sqrt(np.where(spread, variances, 1.0)), 0.0)

    return statistic


def _standardised(values: Values) -> Values:
    standardised: Values = (values - values.mean()) / (values.std() or 1.0)
    return standardised


def _ranks(values: Values) -> Values:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Values = (last - (counts - 1) / 2)[place]
    return ranks


def _holm(marks: Marks) -> Marks:
    """Holm's step-down correction: the i-th smallest of m p values times m − i, never below the one before."""
    tested = sorted(((mark.p, key) for key, mark in marks.items() if mark.p is not None), key=lambda pair: pair[0])
    corrected = dict(marks)
    highest = 0.0
    for place, (p, key) in enumerate(tested):
        highest = max(highest, min(1.0, p * (len(tested) - place)))
        corrected[key] = replace(marks[key], p=highest)
    return corrected
