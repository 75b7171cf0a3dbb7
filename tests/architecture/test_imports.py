import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "onnx", "optimum", "safetensors", "qdrant_client", "grpc", "pyarrow")


@pytest.mark.parametrize(
    "module", ["service.http.app", "service.command", "indexer.command", "models.evaluation.command", "cli"]
)
def test_serving_indexing_and_evaluation_load_no_training_or_database_library(module: str) -> None:
    code = f"import {module}, sys; print([name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_the_import_contract_of_the_service_lists_every_indexer_module() -> None:
    """The contract lists the modules that may be imported; a new module must be listed."""
    settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = [each for each in settings["contracts"] if each["name"].startswith("service imports only")]
    modules = {f"indexer.{path.stem}" for path in Path("indexer").glob("*.py") if path.stem != "__init__"}
    assert modules - set(contract["forbidden_modules"]) == {"indexer.passages", "indexer.errors"}
    assert all(
        name.split(".")[-1] in contract["name"] for name in ("indexer.store", "indexer.passages", "indexer.errors")
    )


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
