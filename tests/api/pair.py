"""A collection indexed by another encoder than the served one, without the weights of a second encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from indexer.build import BuildOptions, build
from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder, Vectors
from models.encoder.spec import Side, Variant
from tests.api.support import ENTRIES, Built

SHIFTED, WEIGHT = "document encoder", 0.6


class ShiftedEncoder:
    """Wraps the bundled encoder and shifts all vectors in one direction, as another document encoder would."""

    variant = Variant.FP32
    fingerprint = SHIFTED
    bulk_texts = 64

    def __init__(self, encoder: OnnxEncoder) -> None:
        self.spec, self.tokenizer, self._encoder = encoder.spec, encoder.tokenizer, encoder
        self._towards = np.random.default_rng(0).standard_normal(self.spec.dim).astype(np.float32)
        self._towards /= np.linalg.norm(self._towards)

    def encode(self, texts: Sequence[str], side: Side) -> Vectors:
        vectors = WEIGHT * self._encoder.encode(texts, side) + (1 - WEIGHT) * self._towards
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


def build_shifted(folder: Path, encoder: OnnxEncoder, query_encoder: OnnxEncoder | None) -> Built:
    """Builds a collection of the usual entries with a shifted document encoder."""
    corpus, collection = folder / "corpus.jsonl", Collection(folder / "collection")
    rows = [{"_id": entry["id"], "title": entry["title"], "text": entry["text"]} for entry in ENTRIES]
    corpus.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    options = BuildOptions(passage_tokens=64, overlap=16, query_encoder=query_encoder)
    version = build([corpus], ShiftedEncoder(encoder), collection, options).version
    collection.publish(version)
    return Built(collection.root, {"a": version})
