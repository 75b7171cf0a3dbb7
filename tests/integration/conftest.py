"""Fixtures of the integration tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from models.encoder.onnx import OnnxEncoder
    from tests.api.support import Built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, encoder: OnnxEncoder) -> Built:
    """Yields a collection of two versions that belongs to one file of tests."""
    from tests.api.support import build_collection

    return build_collection(tmp_path_factory.mktemp("service") / "collection", encoder)
