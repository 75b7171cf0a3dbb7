"""Metrics of rankings and similarities, computed by ranx and scipy.

nDCG uses the grade as gain. Recall and average precision, at every depth, divide by the number R of all relevant
documents, as trec_eval, BEIR and mteb do. An empty ranking scores 0.

ranx and scipy take seconds to import, so the functions import them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_NAME = re.compile(r"(\w+)(@\d+)?")
_RANX = {"nDCG": "ndcg", "Recall": "recall", "MRR": "mrr", "Acc": "hit_rate", "MAP": "map"}
_NOTHING = -1.0


def ranked(
    grades: Sequence[Mapping[int, int]], rankings: Sequence[NDArray[np.int64]], names: Sequence[str], relevant: int = 1
) -> dict[str, Values]:
    """Compute each metric of each query, between 0 and 1: {name: (queries,)}.

    `grades` and `rankings` name documents by row; a ranking is in its final order, best first. Documents are relevant
    from the grade `relevant` on. A name without a depth ("MAP") covers the whole ranking.
    """
    run = _array([[(row, -place) for place, row in enumerate(rows.tolist())] for rows in rankings])
    best_first = [sorted(of_query.items(), key=lambda pair: -pair[1]) for of_query in grades]
    return _evaluate(best_first, run, names, relevant)


def mean_percent(values: Values) -> float:
    return 100 * float(np.mean(values))


def correlations(similarities: Sequence[float] | NDArray[np.float32], scores: Sequence[float]) -> dict[str, float]:
    """Pearson's and Spearman's correlation, between -1 and 1; 0 where every similarity is the same."""
    from scipy import stats  # type: ignore[import-untyped]

    first, second = np.asarray(similarities, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return {"Pearson": 0.0, "Spearman": 0.0}
    return {
        "Pearson": float(stats.pearsonr(first, second).statistic),
        "Spearman": float(stats.spearmanr(first, second).statistic),
    }


def _evaluate(
    grades: Sequence[Sequence[tuple[int, int]]], run: Values, names: Sequence[str], relevant: int
) -> dict[str, Values]:
    import ranx  # type: ignore[import-untyped]

    asked = {name: f"{_parse(name)}-l{relevant}" for name in names}
    # Asked for one metric alone, ranx looks its result up under another name; the last one is never read.
    with warnings.catch_warnings():
        # numba compiles the metrics at the first call and remarks on casts of array sizes.
        warnings.simplefilter("ignore")
        values = ranx.evaluate(_array(grades), run, [*asked.values(), "hits@1"], return_mean=False)
    return {name: values[theirs] for name, theirs in asked.items()}


def _parse(name: str) -> str:
    """The name that ranx has for a metric."""
    match = _NAME.fullmatch(name)
    if match is None or match[1] not in _RANX:
        raise ValueError(f"no metric is called {name!r}")
    return _RANX[match[1]] + (match[2] or "")


def _array(lists: Sequence[Sequence[tuple[int, int]]]) -> Values:
    """(queries, longest, 2) of rows and values; short lists end in a row that no document has, of grade 0."""
    longest = max([1, *(len(pairs) for pairs in lists)])
    array = np.zeros((len(lists), longest, 2))
    array[:, :, 0] = _NOTHING
    for place, pairs in enumerate(lists):
        if pairs:
            array[place, : len(pairs)] = pairs
    return array
