"""Wraps a pair of encoders as a model for mteb: `mteb.evaluate(MtebPair.load("FOLDER"), tasks=…)`.

Also imports mteb on CPUs without a wheel of `pytrec_eval`, by a replacement of what mteb uses of it. ranx cannot be
used: it divides the precision of a ranking shorter than the cut-off by the ranking's length.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.encoder.spec import Side
from models.errors import BadEncoder, CareError
from models.evaluation.cache import Vectors
from models.evaluation.encoders import OpenEncoder, open_encoder
from models.evaluation.readers import EncoderReader, PairReader
from models.evaluation.sets import Kind, PairSet, Task

Values = NDArray[np.float64]
MODULE = "pytrec_eval"


def import_mteb() -> ModuleType:
    """Imports mteb; if pytrec_eval is not installed, a replacement takes its place first."""
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
        parts = (measure.partition(".") for measure in measures)
        self._measures = [(name, [int(cut) for cut in cuts.split(",")]) for name, _, cuts in parts]

    def evaluate(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """By query, every measure at every cut-off (`ndcg_cut_10`); queries without judgements are left out."""
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


ORGANISATION = "care-search"
"""mteb requires an organisation in the name of a model."""


class MtebPair:
    """Implements mteb's `EncoderProtocol`. An instruction of None leaves the encoder its own."""

    def __init__(
        self, query: OpenEncoder, document: OpenEncoder, *, query_instruction: str | None = None,
        document_instruction: str | None = None,
    ) -> None:  # fmt: skip
        for encoder, side in ((query, Side.QUERY), (document, Side.DOCUMENT)):
            if side not in encoder.spec.sides:
                raise BadEncoder(f"{encoder.name}: not made to read {side} texts; take the pair's other encoder")
        self._reader = PairReader(EncoderReader(query, None), EncoderReader(document, None))
        # Readers ask a task for its instructions and nothing else.
        sentences = PairSet("mteb", [], [])
        self._task = Task("mteb", sentences, Kind.STS, "Pearson", query_instruction, document_instruction)
        self.mteb_model_meta = self._describe(query, document)

    @classmethod
    def load(
        cls, query: str, document: str | None = None, *, query_instruction: str | None = None,
        document_instruction: str | None = None,
    ) -> MtebPair:  # fmt: skip
        """Opens a query encoder and a document encoder of one space; a single folder is its own pair.

        Folders are written as `care eval` takes them, with ONNX graphs or torch weights: `FOLDER[,variant=fp32,…]`.
        """
        first = open_encoder(query)
        second = open_encoder(document) if document else first
        return cls(first, second, query_instruction=query_instruction, document_instruction=document_instruction)

    def encode(self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: object = None, **_: object) -> Vectors:
        """Encodes mteb's batches {text: [...]} to unit vectors (texts, dim); ignores other facts of the task."""
        side = Side.DOCUMENT if prompt_type == Side.DOCUMENT else Side.QUERY
        return self._reader.read([text for batch in inputs for text in batch["text"]], side, self._task)

    def similarity(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Vectors:
        """Cosines (first, second)."""
        return np.asarray(np.asarray(embeddings1) @ np.asarray(embeddings2).T, dtype=np.float32)

    def similarity_pairwise(self, embeddings1: ArrayLike, embeddings2: ArrayLike) -> Vectors:
        """Cosines (pairs,) of rows that belong together."""
        return np.asarray((np.asarray(embeddings1) * np.asarray(embeddings2)).sum(axis=-1), dtype=np.float32)

    def _describe(self, query: OpenEncoder, document: OpenEncoder) -> Any:  # noqa: ANN401 -- mteb's ModelMeta
        """Describes the model for mteb's results; the revision names the weights, so no cached result outlives them."""
        import_mteb()
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        facts = self._reader.query.facts if query is document else self._reader.facts
        stated = {f"{side}_instruction": self._task.instruction(side) for side in Side}
        stated = {name: text for name, text in stated.items() if text is not None}
        own = (query.spec.query_instruction, document.spec.document_instruction)
        return ModelMeta.create_empty(
            {
                "name": f"{ORGANISATION}/{facts.name}",
                "revision": facts.fingerprint,
                "n_parameters": facts.parameters,
                "max_tokens": min(query.spec.max_length, document.spec.max_length),
                "embed_dim": facts.dim,
                "similarity_fn_name": ScoringFunction.COSINE,
                "use_instructions": any(own) or any(stated.values()),
                "experiment_kwargs": stated or None,
            }
        )
