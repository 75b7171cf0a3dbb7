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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.errors import BadData
from models.evaluation.results import GOLD_SCORE, SIMILARITY, Run, SetResult
from models.evaluation.sets import Kind

RESAMPLES = 10_000
SEED = 20_000
ALPHA = 0.05
MIN_QUERIES = 20
"""Draws from fewer queries than this repeat each other so often that their spread is noise."""
DRAWN_AT_ONCE = 2_000_000
# Values are sums of a few reciprocals, and draws often tie with the observed difference but for their rounding.
ROUNDING = 1e-9

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Mark:
    """The difference between a system and a baseline, on a set or an average of sets, in percent points."""

    baseline: str
    difference: float
    low: float
    high: float
    """The middle 95 % of the draws lie between `low` and `high`."""
    p: float | None
    """How often chance alone would show such a difference; None if the queries are too few to tell."""
    t_test: float | None = None
    """p of the paired t-test over the queries of one set, which papers print; never corrected. None for averages and
    sentence pairs, and if no query differs."""

    @property
    def symbol(self) -> str:
        """↑ for better, ↓ for worse, nothing if chance may be the reason."""
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
        found |= _holm({(benchmark, *key): mark for key, mark in _table_marks(results, baseline)})
    return found


def averages(results: Iterable[SetResult]) -> list[tuple[str, ...]]:
    """Returns the sets of each average of a table: of every kind that has several sets, then of all kinds."""
    kinds: dict[Kind, dict[str, None]] = defaultdict(dict)
    for result in results:
        kinds[result.kind][result.set_name] = None
    groups = [tuple(names) for names in kinds.values() if len(names) > 1]
    return groups + [tuple(name for names in kinds.values() for name in names)] * (len(kinds) > 1)


def paired(results: Sequence[SetResult], baseline: SetResult) -> list[Mark]:
    """One mark for each result of the baseline's set, not corrected for the number of comparisons."""
    return [
        replace(_mark(baseline.system, *_drawn(result, baseline)), t_test=_t_test(result, baseline))
        for result in results
    ]


def _table_marks(results: Sequence[SetResult], baseline: str) -> Iterator[tuple[tuple[tuple[str, ...], str], Mark]]:
    """Yields the marks of one benchmark, not corrected: of its sets, then of its averages."""
    baselines = {result.set_name: result for result in results if result.system == baseline}
    others = [result for result in results if result.system != baseline and result.set_name in baselines]
    places = {name: place for place, name in enumerate(baselines)}
    by_key = {(each.set_name, each.system): each for each in others}
    drawn = {key: _drawn(each, baselines[each.set_name], places[each.set_name]) for key, each in by_key.items()}
    for group in [*((name,) for name in baselines), *averages(results)]:
        for system in dict.fromkeys(result.system for result in others):
            parts = [drawn[name, system] for name in group if (name, system) in drawn]
            if len(parts) == len(group):
                observed, draws = zip(*parts, strict=True)
                mark = _mark(baseline, float(np.mean(observed)), np.mean(draws, axis=0))
                if len(group) == 1:
                    mark = replace(mark, t_test=_t_test(by_key[group[0], system], baselines[group[0]]))
                yield (group, system), mark


def _drawn(result: SetResult, baseline: SetResult, stream: int = 0) -> tuple[float, Values]:
    """Returns the observed difference and those of the draws (RESAMPLES,): NaN if there are too few queries.

    `stream` chooses the draws: two sets of one size in an average must not be drawn alike. scipy takes 1.2 s of a core
    for ten systems and 1,000 queries; counting draws once for all systems took 0.6 s and gave the same marks.
    """
    from scipy import stats  # type: ignore[import-untyped]

    _check_same_queries(result, baseline)
    data: tuple[Values, ...]
    statistic: Callable[..., Any] = _correlation_difference if result.kind is Kind.STS else np.mean
    if result.kind is Kind.STS:
        data = (_pairs(result)[0], *_pairs(baseline))
    else:
        data = (_values(result, result.main_metric) - _values(baseline, result.main_metric),)
    queries, observed = len(baseline.queries), float(statistic(*data, axis=-1))
    if queries < MIN_QUERIES:
        return observed, np.full(RESAMPLES, np.nan)
    found = stats.bootstrap(
        data, statistic, paired=True, vectorized=True, method="percentile", n_resamples=RESAMPLES,
        batch=max(1, DRAWN_AT_ONCE // queries), rng=np.random.default_rng([SEED, stream] if stream else SEED),
    )  # fmt: skip
    return observed, found.bootstrap_distribution


def _t_test(result: SetResult, baseline: SetResult) -> float | None:
    """Returns the two-sided p of a paired t-test; None where it is not defined or the queries are too few."""
    from scipy import stats

    if result.kind is Kind.STS or len(result.queries) < MIN_QUERIES:
        return None
    values, others = (_values(each, result.main_metric) for each in (result, baseline))
    return float(stats.ttest_rel(values, others).pvalue) if np.ptp(values - others) > ROUNDING else None


def _correlation_difference(result: Values, baseline: Values, gold: Values, axis: int = -1) -> Values:
    first, second = (_correlation(each, gold, axis) for each in (result, baseline))
    return first - second


def _correlation(first: Values, second: Values, axis: int) -> Values:
    """Pearson's correlation of standardised values; 0 if all values of a draw are alike."""
    x, y = (values - values.mean(axis=axis, keepdims=True) for values in (first, second))
    variances = (x * x).mean(axis=axis) * (y * y).mean(axis=axis)
    spread = variances > ROUNDING
    return np.where(spread, (x * y).mean(axis=axis) / np.sqrt(np.where(spread, variances, 1.0)), 0.0)


def _mark(baseline: str, difference: float, drawn: Values) -> Mark:
    if np.isnan(drawn).any():
        return Mark(baseline, 100 * difference, 100 * difference, 100 * difference, None)
    strayed = np.abs(drawn - difference) >= abs(difference) - ROUNDING
    low, high = np.percentile(drawn, (2.5, 97.5)).tolist()
    return Mark(baseline, 100 * difference, 100 * low, 100 * high, (1 + int(strayed.sum())) / (1 + RESAMPLES))


def per_query(result: SetResult) -> Values:
    """Returns what each query adds to the set's figure, (queries,): their mean is the figure, between −1 and 1.

    A sentence pair adds the product of its two standardised values, whose mean is the correlation.
    """
    if result.kind is not Kind.STS:
        return _values(result, result.main_metric)
    similarity, gold = _pairs(result)
    return similarity * gold


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


def _pairs(result: SetResult) -> tuple[Values, Values]:
    """Similarities and given scores, or their ranks, standardised: Pearson's correlation is the set's main metric."""
    from scipy import stats

    values = _values(result, SIMILARITY), _values(result, GOLD_SCORE)
    similarity, gold = map(stats.rankdata, values) if result.main_metric == "Spearman" else values
    # Standardised, so that the differences of sums lose no digits.
    return _standardised(similarity), _standardised(gold)


def _standardised(values: Values) -> Values:
    standardised: Values = (values - values.mean()) / (values.std() or 1.0)
    return standardised


def _values(result: SetResult, name: str) -> Values:
    try:
        return np.array([query.metrics[name] for query in result.queries])
    except KeyError as error:
        raise BadData(f"{result.set_name}: {result.system} keeps no {name} by query; run care eval again") from error


def _holm(marks: Marks) -> Marks:
    """Holm's step-down correction: the i-th smallest of m p values times m − i, never below the one before."""
    tested = sorted(((mark.p, key) for key, mark in marks.items() if mark.p is not None), key=lambda pair: pair[0])
    corrected = dict(marks)
    highest = 0.0
    for place, (p, key) in enumerate(tested):
        highest = max(highest, min(1.0, p * (len(tested) - place)))
        corrected[key] = replace(marks[key], p=highest)
    return corrected
