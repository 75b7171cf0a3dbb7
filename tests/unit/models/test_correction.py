"""What sets two encoders apart is learnt from passages that both have read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from models.correction import Correction, names_of, sample_rows
from models.spec import EncoderSpec, Variant
from tests.support.evaluation import a_spec

DIM = 16


def directions(count: int, seed: int) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_slope_and_offset_are_found_again() -> None:
    fresh, offset = directions(50, 0), directions(1, 1)[0]
    correction = Correction.fit(fresh, 0.6 * fresh + offset)
    assert correction.slope == pytest.approx(0.6, abs=1e-3)
    np.testing.assert_allclose(correction.offset, offset, atol=1e-3)
    unseen = directions(5, 2)
    np.testing.assert_allclose(correction(unseen.astype(np.float16)), 0.6 * unseen + offset, atol=1e-3)
    assert correction(unseen).dtype == np.float32


def test_what_the_encoders_share_only_in_part_is_found_no_more_and_no_less_often() -> None:
    """Half of a vector is the other encoder's own view: the nearest must score alike all the same."""
    fresh, own = directions(400, 0), directions(400, 1)
    indexed = 0.5 * fresh + 0.5 * own
    indexed += 0.3 - indexed.mean(axis=0)
    correction = Correction.fit(fresh, indexed)
    corrected = correction(fresh)
    np.testing.assert_allclose(corrected.mean(axis=0), indexed.mean(axis=0), atol=1e-5)
    queries = directions(200, 2)
    best = [np.sort(queries @ vectors.T, axis=1)[:, -5:].mean() for vectors in (corrected, indexed)]
    assert best[0] == pytest.approx(best[1], rel=0.05)


def test_one_passage_says_where_it_lies_and_nothing_else() -> None:
    fresh, indexed = directions(1, 0), directions(1, 1)
    correction = Correction.fit(fresh, indexed)
    assert correction.slope == 1.0
    np.testing.assert_allclose(correction(fresh), indexed, atol=1e-6)


def test_rows_are_taken_at_equal_distances() -> None:
    assert sample_rows(3, 5).tolist() == [0, 1, 2]
    assert sample_rows(101, 5).tolist() == [0, 25, 50, 75, 100]
    assert sample_rows(1).tolist() == [0]
    rows = sample_rows(1_000_003)
    assert (len(rows), rows[0], rows[-1]) == (256, 0, 1_000_002)


def test_all_graphs_of_a_folder_are_one_encoder() -> None:
    graphs = {Variant.INT8.filename: "1", Variant.FP16.filename: "2", "tokenizer.json": "3"}
    spec: EncoderSpec = a_spec().model_copy(update={"checksums": graphs})
    names = names_of(SimpleNamespace(spec=spec, fingerprint="by torch"))
    assert names == {spec.fingerprint("model.int8.onnx"), spec.fingerprint("model.fp16.onnx"), "by torch"}
