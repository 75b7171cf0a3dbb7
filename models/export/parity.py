"""Compares an exported graph with its reference on the check texts, and refuses it below its floor."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Parity, Variant
from models.errors import ParityError

Vectors = NDArray[np.float32]

TOP = 10


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that a graph must reach to be kept: mean and worst cosine, mean share of the reference's top 10."""

    cosine: float
    worst_cosine: float
    top10_overlap: float


# fp32 differs by the order of sums only, so anything below is a defect. fp16 keeps ten bits: real encoders lose less
# than 0.0001. int8 is a trade: bge-small reaches 0.997, and below 0.99 nDCG@10 falls by more than half a point.
FLOORS: Mapping[Variant, Floor] = {
    Variant.FP32: Floor(cosine=0.9999, worst_cosine=0.9995, top10_overlap=0.99),
    Variant.FP16: Floor(cosine=0.999, worst_cosine=0.995, top10_overlap=0.97),
    Variant.INT8: Floor(cosine=0.99, worst_cosine=0.97, top10_overlap=0.88),
}


def check_parity(folder: Path, variant: Variant, reference: Vectors, floor: Floor) -> Parity:
    """Compares one graph of an encoder folder with the reference's vectors of the check texts; raises ParityError."""
    gpu = variant is Variant.FP16 and "CUDAExecutionProvider" in ort.get_available_providers()
    encoder = OnnxEncoder.load(folder, variant, device="cuda" if gpu else "cpu")
    vectors = encoder.encode(CHECK_TEXTS, encoder.spec.sides[0])
    cosines = row_cosines(vectors, reference)
    mean, worst = round(float(cosines.mean()), 6), float(cosines.min())
    parity = Parity(cosine=mean, top10_overlap=round(top_overlap(vectors, reference), 4), texts=len(CHECK_TEXTS))
    # Written so that a NaN, which compares false with everything, is refused too.
    if not (mean >= floor.cosine and worst >= floor.worst_cosine and parity.top10_overlap >= floor.top10_overlap):
        raise ParityError(
            f"{variant.filename} is not the encoder it was made from: cosine {parity.cosine:.5f} "
            f"(floor {floor.cosine}), worst {worst:.5f} ({floor.worst_cosine}), top-10 overlap "
            f"{parity.top10_overlap:.3f} ({floor.top10_overlap}); leave it out or export by another backend"
        )
    return parity


def row_cosines(vectors: Vectors, reference: Vectors) -> Vectors:
    """Returns the cosine of each row of one with the same row of the other."""
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    cosines: Vectors = (vectors * reference).sum(axis=1) / norms
    return cosines


def top_overlap(vectors: Vectors, reference: Vectors) -> float:
    """Mean share of each text's ten nearest others that stay so when its own vector comes from the exported graph.

    The other side stays the reference: queries are encoded by the served graph, documents were encoded offline.
    """
    expected, found = reference @ reference.T, vectors @ reference.T
    np.fill_diagonal(expected, -np.inf)
    np.fill_diagonal(found, -np.inf)
    pairs = zip(np.argsort(-expected, axis=1)[:, :TOP], np.argsort(-found, axis=1)[:, :TOP], strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / TOP for a, b in pairs]))


def check_pairs() -> list[tuple[str, str]]:
    """Queries and documents that rerankers are compared on: every question with some passages, of all lengths."""
    passages = [*_PASSAGES, *_LONG]
    return [
        (question, passages[(5 * row + 7 * step) % len(passages)])
        for row, question in enumerate((*_SHORT, *_QUESTIONS))
        for step in range(3)
    ]


_SHORT, _QUESTIONS, _PASSAGES, CALIBRATION_TEXTS = (
    tuple[str, ...](texts)
    for texts in tomllib.loads(Path(__file__).with_name("check_texts.toml").read_text(encoding="utf-8")).values()
)
# Longer than 512 tokens for every tokenizer in use, and of different ends, so that the cut is compared as well.
_LONG = (
    "".join(_PASSAGES[:12]),
    "".join(reversed(_PASSAGES[:12])),
    " ".join(_PASSAGES[12:18]) * 4,
    "".join(_PASSAGES[3:9]) + " ".join(_PASSAGES[12:]) * 2,
)
CHECK_TEXTS = (*_SHORT, *_QUESTIONS, *_PASSAGES, *_LONG)
# Four of them are long: in larger batches the others would be padded to their length.
AT_ONCE = 4
