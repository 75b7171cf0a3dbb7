"""What tests of several folders share, each made when it is first asked for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from models.onnx_encoder import OnnxEncoder

# Needs packages that the development environment does without.
collect_ignore = [] if find_spec("moto") and find_spec("s3fs") else ["integration/test_s3_shards.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Larger sizes for the tests that kill processes, and what only another machine has."""
    group = parser.getgroup("care", "CARE Search")
    group.addoption("--kills", type=int, help="kills of a build (make kill-index)")
    group.addoption("--documents", type=int, help="documents of a build that is killed")
    group.addoption("--shard", type=int, default=8, help="texts of a shard of a build that is killed")
    group.addoption("--runs", type=int, default=20, help="runs of writers that are killed (make kill-writes)")
    group.addoption("--seed", type=int, default=0, help="of the kills")
    group.addoption("--fast", action="store_true", help="a stand-in for the encoder")
    group.addoption("--snapshots", help="folder of snapshots, written if it is empty, else compared with this machine")
    group.addoption("--qdrant", help="address of a real Qdrant server, as http://host:6333")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def encoder() -> OnnxEncoder:
    """The bundled one."""
    from models.onnx_encoder import OnnxEncoder

    return OnnxEncoder.load(Path("models/pretrained/care-small-zh"), threads=1)
