"""Exports a reranker's folder to ONNX graphs (fp32, fp16, int8), each compared with torch on check pairs.

The graphs are made as an encoder's are (`pipeline`); the head is a score instead of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from models.encoder.onnx import OnnxReranker
from models.encoder.pairs import RerankerSpec, ScoreParity
from models.encoder.spec import Variant
from models.encoder.tokenizer import Tokenizer, Tokens
from models.encoder.torch_reranker import TorchReranker
from models.errors import ParityError
from models.export.backbone import append_score_head
from models.export.folders import check_target
from models.export.int8 import calibration_samples
from models.export.parity import CALIBRATION_TEXTS, check_pairs
from models.export.pipeline import ExportReport, Maker, is_large, require_finite, weights_name, write_folder

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Floor:
    """The least correlation with torch's scores, and the most that a score may differ, in their standard deviations."""

    correlation: float
    difference: float


# As an encoder's floors: fp32 differs by the order of sums only, fp16 keeps ten bits, int8 is a trade.
FLOORS: Mapping[Variant, Floor] = {
    Variant.FP32: Floor(correlation=0.9999, difference=0.01),
    Variant.FP16: Floor(correlation=0.999, difference=0.1),
    Variant.INT8: Floor(correlation=0.98, difference=1.0),
}


def export_reranker(
    source: Path, target: Path, *, max_length: int | None = None, variants: Sequence[Variant] = tuple(Variant),
    floors: Mapping[Variant, Floor] = FLOORS,
) -> ExportReport[RerankerSpec]:  # fmt: skip
    """Writes `target` whole or not at all; raises ParityError when a graph stays below its floor."""
    check_target(source, target)
    reranker = TorchReranker.load(source, max_length=max_length)
    require_finite(source, reranker)
    pairs = [reranker.tokenizer.pairs(query, [document])[0] for query, document in check_pairs()]
    reference = reranker.score(pairs)
    backbone, config = cast(PreTrainedModel, reranker.model.base_model), reranker.model.config
    separator = reranker.separator if reranker.spec.token_types else None
    append = partial(append_score_head, layers=score_layers(reranker), separator=separator)
    samples = partial(_samples, reranker, config.vocab_size)
    maker = Maker(backbone, config, append, samples, is_large=is_large(reranker))

    def check(folder: Path, variant: Variant) -> ScoreParity:
        return check_scores(folder, variant, pairs, reference, floors[variant])

    spec = reranker.spec.model_copy(update={"weights": weights_name(source)})
    return write_folder(target, spec, reranker.tokenizer_json, variants, maker, check)


def score_layers(reranker: TorchReranker) -> tuple[nn.Linear, nn.Linear]:
    """Returns the two layers between the first token's state and the score; tanh stands between them."""
    model = cast(Any, reranker.model)  # torch knows none of its modules by name
    if model.config.model_type == "bert":
        return model.bert.pooler.dense, model.classifier
    return model.classifier.dense, model.classifier.out_proj


def _samples(reranker: TorchReranker, vocabulary: int) -> list[Tokens]:
    """Returns what the ranges of activations are measured on: single texts, random ids and pairs."""
    plain = Tokenizer.from_json(reranker.tokenizer_json, reranker.spec.max_length)
    joined = [reranker.tokenizer.pairs(query, [document])[0] for query, document in pairwise(CALIBRATION_TEXTS)]
    return [*calibration_samples(plain, vocabulary), *joined]


def check_scores(
    folder: Path, variant: Variant, pairs: Sequence[Tokens], reference: Scores, floor: Floor
) -> ScoreParity:
    """Returns the parity of one graph with torch's scores of the check pairs; raises ParityError."""
    gpu = variant is Variant.FP16 and "CUDAExecutionProvider" in ort.get_available_providers()
    found = OnnxReranker.load(folder, variant, device="cuda" if gpu else "cpu").score(pairs)
    parity = compare_scores(found, reference)
    # Written so that a NaN, which compares false with everything, is refused too.
    if not (parity.correlation >= floor.correlation and parity.difference <= floor.difference):
        raise ParityError(
            f"{variant.filename} is not the reranker it was made from: correlation {parity.correlation:.5f} (floor "
            f"{floor.correlation}), largest difference {parity.difference:.4f} ({floor.difference}); leave it out"
        )
    return parity


def compare_scores(found: Scores, reference: Scores) -> ScoreParity:
    spread = max(float(reference.std()), 1e-6)
    correlation = round(float(np.corrcoef(found, reference)[0, 1]), 6)
    difference = round(float(np.abs(found - reference).max()) / spread, 5)
    return ScoreParity(correlation=correlation, difference=difference, pairs=len(found))
