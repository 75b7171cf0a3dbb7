from __future__ import annotations

import pytest

from models.onnx_encoder import OnnxEncoder
from tests.api.support import ENCODER


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def encoder() -> OnnxEncoder:
    """The bundled one."""
    return OnnxEncoder.load(ENCODER, threads=1)
