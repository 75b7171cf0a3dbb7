"""The correction between two encoders, fitted on passages that both have read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from models.correction import Correction, names_of
from models.encoder.spec import EncoderSpec, Variant
from tests.support.evaluation import a_spec

DIM = 16


def directions(count: int, seed: int) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def nearest(queries: NDArray[np.float32], vectors: NDArray[np.float32]) -> float:
    return float(np.sort(queries @ vectors.T, axis=1)[:, -5:].mean())


def test_a_shift_common_to_all_texts_is_corrected() -> None:
    fresh, lean = directions(200, 0), directions(1, 1)[0]
    correction = Correction.fit(fresh.astype(np.float16), (fresh + lean).astype(np.float16))
    unseen = directions(5, 2)
    np.testing.assert_allclose(correction(unseen), unseen + lean, atol=0.01)
    assert correction(unseen).dtype == np.float32


def test_shifts_that_differ_by_kind_of_text_are_corrected() -> None:
    """Two separate kinds of texts, whose vectors differ in opposite ways."""
    kinds = np.repeat([1.0, -1.0], 100)[:, None]
    towards, lean = directions(2, 1)
    fresh = 0.5 * directions(200, 0) + kinds * towards
    indexed = fresh + 0.8 * kinds * lean
    moved = Correction.fit(fresh[::2], indexed[::2])(fresh[1::2])
    before, after = (np.linalg.norm(some - indexed[1::2], axis=1).mean() for some in (fresh[1::2], moved))
    assert after < 0.6 * before


def test_nearest_scores_match_for_encoders_that_share_half_of_a_vector() -> None:
    """Half of a vector is independent of the other encoder: the nearest must still have equal scores."""
    fresh = directions(400, 0)
    indexed = 0.5 * fresh + 0.5 * directions(400, 1) + 0.3
    moved = Correction.fit(fresh[:200], indexed[:200])(fresh[200:])
    queries = directions(200, 2)
    wanted = nearest(queries, indexed[200:])
    assert nearest(queries, moved) == pytest.approx(wanted, rel=0.1)
    assert nearest(queries, fresh[200:]) > 1.2 * wanted
    # Least squares alone would move them all near the mean.
    np.testing.assert_allclose(moved.mean(axis=0), indexed[200:].mean(axis=0), atol=0.1)


def test_a_single_passage_gives_only_a_shift() -> None:
    fresh, indexed = directions(1, 0), directions(1, 1)
    for count in (1, 3):
        correction = Correction.fit(np.repeat(fresh, count, axis=0), np.repeat(indexed, count, axis=0))
        np.testing.assert_allclose(correction.matrix, np.eye(DIM), atol=1e-6)
        np.testing.assert_allclose(correction(fresh), indexed, atol=1e-6)


def test_with_few_passages_only_the_common_shift_is_learned() -> None:
    fresh, lean = directions(4, 0), directions(1, 1)[0]
    unseen = directions(50, 2)
    moved = Correction.fit(fresh, fresh + lean)(unseen)
    np.testing.assert_allclose(moved, unseen + lean, atol=1e-4)


def test_all_graphs_of_a_folder_count_as_one_encoder() -> None:
    graphs = {Variant.INT8.filename: "1", Variant.FP16.filename: "2", "tokenizer.json": "3"}
    spec: EncoderSpec = a_spec().model_copy(update={"checksums": graphs})
    names = names_of(SimpleNamespace(spec=spec, fingerprint="by torch"))
    assert names == {spec.fingerprint("model.int8.onnx"), spec.fingerprint("model.fp16.onnx"), "by torch"}
