"""Real Optimum, in a separate environment: export, optimisation and quantisation through the same pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side, Variant
from models.errors import ExportError
from models.export.backbone import DEFAULT_PYTHON, HOW_TO, PYTHON_VARIABLE, find_python, older_dialect, run_worker
from models.export.parity import CHECK_TEXTS
from models.export.pipeline import Backend, export
from tests.support.tiny_models import tiny_encoder


@pytest.fixture(scope="module")
def optimum() -> Path:
    """Fails if Optimum is missing rather than skipping: `make test` provides it."""
    python = find_python()
    if python is None:
        pytest.fail(f"there is no Optimum environment: {HOW_TO}")
    return python


def test_bert_is_exported_fused_and_quantised_by_optimum(optimum: Path, tmp_path: Path) -> None:
    encoder = tiny_encoder("bert", dim=48)
    encoder.save(tmp_path / "trained")
    report = export(
        tmp_path / "trained",
        tmp_path / "served",
        backend=Backend.OPTIMUM,
        optimum_python=optimum,
    )
    assert [graph.made_by for graph in report.graphs] == ["optimum"] * 3
    vectors = OnnxEncoder.load(tmp_path / "served", Variant.FP32).encode(CHECK_TEXTS, Side.QUERY)
    np.testing.assert_allclose(vectors, encoder.encode(CHECK_TEXTS, Side.QUERY), atol=1e-5)
    sizes = {graph.variant: graph.size_bytes for graph in report.graphs}
    assert sizes[Variant.FP16] < 0.6 * sizes[Variant.FP32]
    assert sizes[Variant.INT8] < 0.6 * sizes[Variant.FP32]
    kinds = [node.op_type for node in onnx.load(tmp_path / "served" / "model.int8.onnx").graph.node]
    assert (kinds.count("MultiHeadAttention"), kinds.count("MatMulInteger"), kinds.count("MatMul")) == (2, 12, 0)


@pytest.mark.parametrize("architecture", ["modernbert", "qwen3"])
def test_rotary_settings_are_kept_by_the_older_transformers(architecture: str, optimum: Path, tmp_path: Path) -> None:
    tiny_encoder(architecture).save(tmp_path / "trained")
    report = export(tmp_path / "trained", tmp_path / "served", variants=[Variant.FP32], optimum_python=optimum)
    assert report.graphs[0].made_by == "optimum"
    assert report.graphs[0].parity.cosine > 0.9999


def test_an_error_of_optimum_is_reported_in_one_line(tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 'Traceback:' >&2\necho 'ValueError: no such architecture' >&2\nexit 1\n")
    interpreter.chmod(0o755)
    with pytest.raises(ExportError, match=r"could not export .*no such architecture") as caught:
        run_worker(interpreter, "export", tmp_path, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_gte_is_exported_by_torch_and_refused_for_optimum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "python"
    interpreter.touch()
    monkeypatch.setenv(PYTHON_VARIABLE, str(interpreter))
    tiny_encoder("gte").save(tmp_path / "trained")
    report = export(tmp_path / "trained", tmp_path / "served", variants=[Variant.FP32])
    assert report.graphs[0].made_by == "torch"
    with pytest.raises(ExportError, match="does not take gte"):
        export(tmp_path / "trained", tmp_path / "served", backend=Backend.OPTIMUM)


def test_the_interpreter_comes_from_an_option_a_variable_or_the_default_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    assert DEFAULT_PYTHON.relative_to(Path.cwd()) == Path(".venv-optimum/bin/python")
    assert find_python() in (DEFAULT_PYTHON, None)
    with pytest.raises(ExportError, match="make optimum"):
        find_python(tmp_path / "python")
    (tmp_path / "python").touch()
    assert find_python(tmp_path / "python") == tmp_path / "python"
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    assert find_python() == tmp_path / "python"


def test_without_an_environment_optimum_is_refused_and_auto_is_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr("models.export.backbone.DEFAULT_PYTHON", tmp_path / "absent")
    tiny_encoder("bert").save(tmp_path / "trained")
    with pytest.raises(ExportError, match="no Optimum environment"):
        export(tmp_path / "trained", tmp_path / "served", backend=Backend.OPTIMUM)
    report = export(tmp_path / "trained", tmp_path / "served", variants=[Variant.FP32])
    assert report.graphs[0].made_by == "torch"


def test_scaled_rotary_positions_are_kept_in_the_converted_configuration() -> None:
    with pytest.raises(ExportError, match="backend torch"):
        older_dialect({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0, "factor": 2.0}})
    plain = {"hidden_size": 8}
    assert older_dialect(plain) == plain
