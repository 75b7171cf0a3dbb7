"""The real service as a separate process over a small collection, for all tests of the clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from care_client import AsyncCareClient, CareClient

from models.encoder.onnx import OnnxEncoder
from tests.api.support import AS_ADMIN, ENCODER, PATIENCE_MS, build_collection
from tests.clients.support import Blocking, ScriptedServer
from tests.e2e.server import Server

# Haystack sends telemetry unless this is set before it is imported.
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"


@pytest.fixture(scope="session")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root: Path = tmp_path_factory.mktemp("clients") / "collection"
    build_collection(root, OnnxEncoder.load(ENCODER, threads=1), letters="a")
    server = Server(root)
    try:
        server.start()
        yield server.url
    finally:
        server.stop()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


@pytest.fixture(params=["plain", "asyncio"])
def make(request: pytest.FixtureRequest) -> Iterator[type[CareClient]]:
    """Makes a client of either kind; calls of the asyncio client run to their end, so that one test covers both."""
    with contextlib.ExitStack() as stack:
        if request.param == "plain":
            yield lambda *args, **options: stack.enter_context(CareClient(*args, **options))  # type: ignore[misc]
        else:
            runner = stack.enter_context(asyncio.Runner())
            yield lambda *args, **options: stack.enter_context(  # type: ignore[misc]
                Blocking(AsyncCareClient(*args, **options), runner)
            )


@pytest.fixture
def client(make: type[CareClient], service_url: str) -> CareClient:
    return make(service_url, timeout_seconds=PATIENCE_MS / 1000, headers=AS_ADMIN)
