"""Whether one system is better than another on a set, or only luckier with its queries.

The test is a paired bootstrap: the set's queries are drawn again with replacement, the same draw for every system, and
the observed difference is held against how far the differences of the draws stray from it. Sentence pairs have no
value of their own, so their correlation is computed anew for each draw (Spearman's on the ranks of the whole set).
Knows nothing of how a result is shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
    """How far a system lies above a baseline on one set, in percent points."""

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


Key = tuple[str, str, str]
"""Benchmark, set and system."""
Marks = dict[Key, Mark]


def compare(run: Run, baseline: str) -> Marks:
    """Every system against the baseline, on each set that both were judged on; no mark where there is none.

    A benchmark is one table and its marks are read together, so the p values of its comparisons are corrected by
    Holm's method: with twenty true ties in a table, uncorrected marks would show one difference that is not there.
    """
    sets: dict[tuple[str, str], list[SetResult]] = defaultdict(list)
    for result in run.results:
        sets[result.benchmark, result.set_name].append(result)
    tables: dict[str, Marks] = defaultdict(dict)
    for (benchmark, set_name), results in sets.items():
        against = next((result for result in results if result.system == baseline), None)
        if against is None:
            continue
        others = [result for result in results if result is not against]
        for result, mark in zip(others, paired(others, against), strict=True):
            tables[benchmark][benchmark, set_name, result.system] = mark
    return {key: mark for marks in tables.values() for key, mark in _holm(marks).items()}


def paired(results: Sequence[SetResult], baseline: SetResult) -> list[Mark]:
    """One mark for each result of the baseline's set, not corrected for the number of comparisons."""
    for result in results:
        _check_same_queries(result, baseline)
    queries = len(baseline.queries)
    statistics = [_statistic(result) for result in (baseline, *results)]
    whole = np.ones((1, queries))
    observed = _differences(statistics, whole)[:, 0]
    if queries < MIN_QUERIES:
        return [Mark(baseline.system, 100 * d, 100 * d, 100 * d, None) for d in observed.tolist()]
    draws = np.concatenate([_differences(statistics, counts) for counts in _draws(queries)], axis=1)
    marks = []
    for difference, drawn in zip(observed.tolist(), draws, strict=True):
        strayed = np.abs(drawn - difference) >= abs(difference) - ROUNDING
        low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
        p = (1 + int(strayed.sum())) / (1 + RESAMPLES)
        marks.append(Mark(baseline.system, 100 * difference, 100 * low, 100 * high, p))
    return marks


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


def _draws(queries: int) -> Iterator[Values]:
    """How often each query was drawn: blocks (draws, queries), the same ones at every call."""
    generator = np.random.default_rng(SEED)
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
