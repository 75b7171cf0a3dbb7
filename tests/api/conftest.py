from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from models.encoder.onnx import OnnxEncoder
from service.engine.local import InProcessEngine
from tests.api.gate import Gate
from tests.api.support import Built, build_collection, make_settings, running


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, encoder: OnnxEncoder) -> Built:
    root: Path = tmp_path_factory.mktemp("service") / "collection"
    return build_collection(root, encoder)


@pytest.fixture(scope="session")
async def client(built: Built) -> AsyncIterator[httpx.AsyncClient]:
    """Yields a client of one app, shared by all tests that change nothing."""
    async with running(make_settings(built, threads=1, reload_seconds=0, max_queries=16)) as client:
        yield client


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Puts every engine of the test behind one gate, which is open at first."""
    gate = Gate()
    monkeypatch.setattr(InProcessEngine, "run", lambda *arguments: gate.run(*arguments))
    return gate
