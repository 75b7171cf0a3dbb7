from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from models.onnx_encoder import OnnxEncoder
from tests.api.support import ENCODER, Built, build_collection, make_settings, running


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def encoder() -> OnnxEncoder:
    return OnnxEncoder.load(ENCODER, threads=1)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, encoder: OnnxEncoder) -> Built:
    root: Path = tmp_path_factory.mktemp("service") / "collection"
    return build_collection(root, encoder)


@pytest.fixture(scope="session")
async def client(built: Built) -> AsyncIterator[httpx.AsyncClient]:
    """One app for all tests that change nothing."""
    async with running(make_settings(built, threads=1, reload_seconds=0, max_queries=16)) as client:
        yield client
