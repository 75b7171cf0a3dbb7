"""Importing mteb on every CPU: a stand-in for `pytrec_eval`, which mteb imports and which has no wheel for aarch64.

The stand-in holds what mteb asks of it: one class, five measures, each at any cut-off. The formulas and the order of
ties (by document id, last first) are trec_eval's; ranx is no drop-in for them, because it divides the precision of a
ranking that is shorter than the cut-off by the ranking's length. Knows nothing of tasks or encoders.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from models.errors import CareError

Values = NDArray[np.float64]
MODULE = "pytrec_eval"


def import_mteb() -> ModuleType:
    """The mteb package; where pytrec_eval is not installed, its stand-in takes its place first."""
    if importlib.util.find_spec("mteb") is None:
        raise CareError("mteb is not installed; pip install mteb")
    if importlib.util.find_spec(MODULE) is None:
        stand_in = importlib.util.module_from_spec(ModuleSpec(MODULE, loader=None))  # others look for a spec, too
        stand_in.__dict__["RelevanceEvaluator"] = RelevanceEvaluator
        sys.modules[MODULE] = stand_in
    return importlib.import_module("mteb")


class RelevanceEvaluator:
    """Scores of rankings by query; a measure is written as trec_eval writes it: `ndcg_cut.1,3,10`."""

    def __init__(self, query_relevance: Mapping[str, Mapping[str, int]], measures: Iterable[str]) -> None:
        self._qrels = query_relevance
        self._measures = [(name, _cuts(cuts)) for name, _, cuts in (measure.partition(".") for measure in measures)]

    def evaluate(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """By query, every measure at every cut-off (`ndcg_cut_10`); queries that no one judged are left out."""
        return {query: self._one(self._qrels[query], found) for query, found in scores.items() if query in self._qrels}

    def _one(self, grades: Mapping[str, int], found: Mapping[str, float]) -> dict[str, float]:
        ranking = sorted(found, key=lambda document: (np.float32(found[document]), document), reverse=True)
        gains = np.array([max(grades.get(document, 0), 0) for document in ranking], dtype=np.float64)
        ideal = np.array(sorted((grade for grade in grades.values() if grade > 0), reverse=True), dtype=np.float64)
        return {
            f"{name}_{cut}": float(MEASURES[name](gains, ideal, cut)) if len(ideal) else 0.0
            for name, cuts in self._measures
            for cut in cuts
        }


def _cuts(text: str) -> list[int]:
    return [int(cut) for cut in text.split(",")]


def _dcg(gains: Values) -> float:
    return float(np.sum(gains / np.log2(np.arange(2, len(gains) + 2))))


def _average_precision(gains: Values, ideal: Values, cut: int) -> float:
    relevant = gains[:cut] > 0
    precision = np.cumsum(relevant) / np.arange(1, len(relevant) + 1)
    return float(np.sum(precision[relevant])) / len(ideal)


# Gains of a ranking, gains of the best possible one (never empty), cut-off.
MEASURES: dict[str, Callable[[Values, Values, int], float]] = {
    "ndcg_cut": lambda gains, ideal, cut: _dcg(gains[:cut]) / _dcg(ideal[:cut]),
    "map_cut": _average_precision,
    "recall": lambda gains, ideal, cut: np.count_nonzero(gains[:cut]) / len(ideal),
    "P": lambda gains, ideal, cut: np.count_nonzero(gains[:cut]) / cut,
    "success": lambda gains, ideal, cut: float(np.any(gains[:cut])),
}
