"""The bundled tokenizer and one small snapshot, each made once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexer.store.snapshot import Snapshot
from indexer.store.vectors import limit_threads
from models.encoder.onnx import OnnxEncoder
from models.encoder.tokenizer import Tokenizer
from tests.unit.indexer.support import write_snapshot


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sets FAISS to one thread: its threads wait by spinning, which on a busy machine takes longer than the work."""
    limit_threads(1)


@pytest.fixture(scope="session")
def tokenizer(encoder: OnnxEncoder) -> Tokenizer:
    return encoder.tokenizer


@pytest.fixture(scope="session")
def snapshot_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a finished snapshot of four documents; copy it before changing it."""
    folder = tmp_path_factory.mktemp("snapshot") / "v1"
    write_snapshot(folder)
    return folder


@pytest.fixture(scope="session")
def snapshot(snapshot_folder: Path) -> Snapshot:
    return Snapshot.open(snapshot_folder)
