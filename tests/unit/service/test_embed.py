"""Vector arithmetic: shortening and blending, with unit length restored."""

from __future__ import annotations

import numpy as np
import pytest

from service.search.embedder import blend, normalise, shorten

VECTORS = normalise(np.random.default_rng(7).standard_normal((4, 8)).astype(np.float32))


def test_shortening_truncates_before_it_normalises() -> None:
    short = shorten(VECTORS, 3)
    assert short.shape == (4, 3)
    assert np.linalg.norm(short, axis=1) == pytest.approx(1)
    assert short[0] / short[0, 0] == pytest.approx(VECTORS[0, :3] / VECTORS[0, 0], rel=1e-5)
    assert shorten(VECTORS, 8) is VECTORS


def test_a_zero_vector_stays_zero() -> None:
    assert normalise(np.zeros((1, 3), np.float32)).tolist() == [[0, 0, 0]]


def test_blending_is_the_mean_of_query_and_documents() -> None:
    query, *documents = VECTORS
    blended = blend(query, documents)
    mean = (query + sum(documents)) / 4
    assert blended == pytest.approx(mean / np.linalg.norm(mean), abs=1e-6)
    assert blended.dtype == np.float32
