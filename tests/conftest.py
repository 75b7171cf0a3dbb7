"""What tests of several folders share, each made when it is first asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from models.encoder.onnx import OnnxEncoder


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def encoder() -> OnnxEncoder:
    """The bundled one."""
    from models.encoder.onnx import OnnxEncoder

    return OnnxEncoder.load(Path("models/pretrained/care-small-zh"), threads=1)
