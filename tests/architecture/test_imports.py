import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "onnx", "optimum", "safetensors", "qdrant_client", "grpc", "pyarrow")


@pytest.mark.parametrize(
    "module", ["service.http.app", "service.command", "indexer.command", "models.evaluation.command", "cli"]
)
def test_serving_indexing_and_evaluation_load_no_training_or_database_library(module: str) -> None:
    code = f"import {module}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_the_command_line_alone_loads_no_heavy_library() -> None:
    code = "import cli, sys; print([n for n in ('fastapi', 'faiss', 'onnxruntime', 'numpy') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_a_worker_beside_an_engine_process_loads_neither_faiss_nor_onnxruntime() -> None:
    code = (
        "import service.processes.server, service.engine.remote, service.updates.encoder, sys;"
        "from indexer.store.snapshot import Snapshot;"
        "print([name for name in ('faiss', 'onnxruntime') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
