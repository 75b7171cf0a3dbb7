"""Smoothing and row-wise tables: the same function in float, a closer one in int8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from models.encoder.spec import Variant
from models.encoder.tokenizer import Tokenizer, Tokens, pad
from models.encoder.torch import Projection
from models.errors import ExportError
from models.export import int8
from models.export.backbone import append_head, export_backbone
from models.export.fusions import slim
from models.export.parity import CALIBRATION_TEXTS, CHECK_TEXTS
from models.export.pipeline import export
from tests.support.tiny_models import WIDTH, tiny_encoder, tiny_tokenizer

BATCH = tiny_encoder("bert").tokenizer.batch(CHECK_TEXTS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ModelProto:
    """Makes a tiny BERT with one channel of far larger values, as in trained transformers."""
    encoder = tiny_encoder("bert")
    with torch.no_grad():
        for layer in encoder.backbone.encoder.layer:
            layer.attention.output.LayerNorm.weight[5] *= 15
            layer.intermediate.dense.weight[:, 5] /= 15
    path = tmp_path_factory.mktemp("whole") / "backbone.onnx"
    export_backbone(encoder.backbone, path)
    model = onnx.load(path)
    append_head(model, encoder.spec)
    return model


def prepared(model: ModelProto, batch: list[Tokens]) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    int8.prepare(copy, batch)
    return copy


def vectors(model: ModelProto | Path, batch: list[Tokens] = BATCH) -> np.ndarray:
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    ids, mask = pad(batch)
    (found,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    return np.asarray(found)


def cosine(model: ModelProto | Path, reference: ModelProto) -> float:
    return float(np.sum(vectors(model) * vectors(reference), axis=1).mean())


def quantized(model: ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "float.onnx")
    int8.quantize(folder / "float.onnx", folder / "int8.onnx")
    return folder / "int8.onnx"


def samples() -> list[Tokens]:
    encoder = tiny_encoder("bert")
    return int8.calibration_samples(encoder.tokenizer, encoder.backbone.config.vocab_size)


def test_calibration_uses_texts_and_random_tokens_within_the_encoders_length() -> None:
    tokenizer = tiny_encoder("bert").tokenizer
    drawn = samples()
    assert len(drawn) == len(CALIBRATION_TEXTS) + int8.RANDOM_SAMPLES
    assert all(2 < len(tokens) <= tokenizer.max_length for tokens in drawn)
    assert all((tokens.ids[0], tokens.ids[-1]) == (2, 3) for tokens in drawn)
    assert drawn == samples()
    assert not set(CALIBRATION_TEXTS) & set(CHECK_TEXTS)


@pytest.mark.parametrize("max_length", [3, 4, 5])
def test_an_encoder_of_a_few_tokens_is_calibrated_too(max_length: int) -> None:
    drawn = int8.calibration_samples(Tokenizer.from_json(tiny_tokenizer().to_str(), max_length), vocabulary=20)
    assert all(2 < len(tokens) <= max_length for tokens in drawn)


def test_smoothing_does_not_change_the_function_in_float(whole: ModelProto) -> None:
    ready = prepared(whole, samples())
    assert any(node.name.endswith("/smoothed") for node in ready.graph.node)
    assert cosine(ready, whole) > 0.9999  # only the embedding tables are rounded


def test_smoothing_brings_int8_closer(whole: ModelProto, tmp_path: Path) -> None:
    plain = 1 - cosine(quantized(whole, tmp_path), whole)
    smoothed = 1 - cosine(quantized(prepared(whole, samples()), tmp_path), whole)
    assert smoothed < plain / 3


@pytest.fixture(scope="module")
def outlying(tmp_path_factory: pytest.TempPathFactory) -> ModelProto:
    """Makes a tiny BERT with one channel behind each Gelu that is far larger than the others."""
    encoder = tiny_encoder("bert")
    with torch.no_grad():
        for layer in encoder.backbone.encoder.layer:
            layer.intermediate.dense.bias.normal_()  # equal ones would be one tensor in the graph
            layer.intermediate.dense.bias[7] = 40
            layer.output.dense.weight[:, 7] /= 40
    path = tmp_path_factory.mktemp("outlying") / "backbone.onnx"
    export_backbone(encoder.backbone, path)
    model = onnx.load(path)
    append_head(model, encoder.spec)
    slim(model, encoder.backbone.config)
    return model


def test_setting_channels_apart_does_not_change_the_function_in_float(outlying: ModelProto) -> None:
    ready = prepared(outlying, samples())
    assert any(node.name.endswith(int8.FEW) for node in ready.graph.node)
    assert cosine(ready, outlying) > 0.9999


def test_channels_set_apart_bring_int8_closer_and_stay_in_float(
    outlying: ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantized(prepared(outlying, samples()), tmp_path)
    apart = 1 - cosine(path, outlying)
    products = [node for node in onnx.load(path).graph.node if node.op_type == "MatMul"]
    assert {node.name.endswith(int8.FEW) for node in products if node.input[1].endswith("/weight")} == {True}
    monkeypatch.setattr(int8, "OUTLYING", np.inf)
    together = 1 - cosine(quantized(prepared(outlying, samples()), tmp_path), outlying)
    assert apart < together / 3


def test_channels_of_like_size_stay_together(whole: ModelProto) -> None:
    slim_model = ModelProto()
    slim_model.CopyFrom(whole)
    slim(slim_model, tiny_encoder("bert").backbone.config)
    assert not any(node.name.endswith(int8.FEW) for node in prepared(slim_model, samples()).graph.node)


def test_what_reads_hidden_units_stays_in_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fitted projection makes large parts of the pooled vector and of the hidden units, which cancel."""
    encoder, own = tiny_encoder("bert"), torch.eye(WIDTH)
    projection = Projection(WIDTH, WIDTH, hidden=2 * WIDTH)
    assert projection.hidden is not None
    with torch.no_grad():
        projection.hidden.weight.copy_(torch.cat([own, -own]))  # x = relu(x) - relu(-x)
        projection.hidden.bias.zero_()
        torch.manual_seed(0)
        much = 3 * torch.randn(WIDTH, WIDTH)
        projection.weight.copy_(torch.cat([own + much, -much, much], dim=1))
    export_backbone(encoder.backbone, tmp_path / "backbone.onnx")
    model = onnx.load(tmp_path / "backbone.onnx")
    append_head(model, encoder.spec, projection)
    apart = 1 - cosine(quantized(prepared(model, samples()), tmp_path), model)
    makes = int8._Graph.makes
    monkeypatch.setattr(
        int8._Graph, "makes", lambda graph, name, kind: None if kind == "Concat" else makes(graph, name, kind)
    )
    together = 1 - cosine(quantized(prepared(model, samples()), tmp_path), model)
    assert apart < 0.02
    assert apart < together / 2


def test_every_weight_becomes_int8(whole: ModelProto, tmp_path: Path) -> None:
    path = quantized(prepared(whole, samples()), tmp_path)
    floats = [t for t in onnx.load(path).graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) == 2]
    assert all(tensor.dims[1] == 1 or tensor.dims[0] < int8.SMALLEST_TABLE for tensor in floats)
    assert path.stat().st_size < 0.5 * whole.ByteSize()


def test_a_weight_shared_by_two_products_is_not_smoothed() -> None:
    weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    table = np.random.default_rng(1).normal(size=(300, 8)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["a"]),
        helper.make_node("MatMul", ["a", "weight"], ["b"], name="first"),
        helper.make_node("MatMul", ["b", "weight"], ["c"], name="second"),
        helper.make_node("Unsqueeze", ["attention_mask", "axis"], ["wide"]),
        helper.make_node("Cast", ["wide"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["c", "mask"], ["embedding"]),
    ]
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT64, ["b", "s"]) for n in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, None)]
    constants = {"table": table, "weight": weight, "axis": np.array([2])}
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "shared", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    batch = [Tokens([1, 2, 299], truncated=False)]
    ready = prepared(model, batch)
    assert "table" not in {tensor.name for tensor in ready.graph.initializer}
    np.testing.assert_allclose(vectors(ready, batch), vectors(model, batch), atol=0.2)
    kept = next(tensor for tensor in ready.graph.initializer if tensor.name == "weight")
    np.testing.assert_array_equal(numpy_helper.to_array(kept), weight)


@pytest.mark.parametrize("variant", [Variant.INT8, Variant.FP32])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, variant: Variant) -> None:
    encoder = tiny_encoder("bert")
    name, weight = next(iter(encoder.named_parameters()))
    torch.nn.init.constant_(weight, float("nan"))
    encoder.save(tmp_path / "trained")
    with pytest.raises(ExportError, match=f"the weight {name} is not finite"):
        export(tmp_path / "trained", tmp_path / "served", variants=[variant])
    assert not (tmp_path / "served").exists()
