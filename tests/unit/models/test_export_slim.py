"""Slimming keeps the function: fused attention, and only the pooled token in the last layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, NodeProto, helper, numpy_helper
from transformers import RobertaConfig, RobertaModel

from models.encoder.spec import POOLINGS, Pooling
from models.encoder.tokenizer import pad
from models.encoder.torch import TorchEncoder
from models.export import int8
from models.export.backbone import append_head, export_backbone
from models.export.fusions import ATTENTION, slim
from models.export.parity import CHECK_TEXTS
from tests.support.tiny_models import tiny_config, tiny_encoder, tiny_spec, tiny_tokenizer

LAYERS = 2


def encoder_of(architecture: str, pooling: Pooling | None = None) -> TorchEncoder:
    if architecture != "roberta":
        return tiny_encoder(architecture, pooling)
    torch.manual_seed(0)
    shape = tiny_config("xlm-roberta").to_dict()
    del shape["model_type"]
    backbone = RobertaModel(RobertaConfig(**shape), add_pooling_layer=False)
    return TorchEncoder(backbone, tiny_spec("roberta", pooling), tiny_tokenizer().to_str()).eval()


def whole_graph(encoder: TorchEncoder, folder: Path) -> ModelProto:
    export_backbone(encoder.backbone, folder / "backbone.onnx")
    model = onnx.load(folder / "backbone.onnx")
    append_head(model, encoder.spec)
    return model


def run(model: ModelProto, ids: np.ndarray, mask: np.ndarray, *outputs: str) -> list[np.ndarray]:
    probe = ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs)
    session = ort.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in session.run(None, {"input_ids": ids, "attention_mask": mask})]


def kinds(model: ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def makers(model: ModelProto) -> dict[str, NodeProto]:
    return {name: node for node in model.graph.node for name in node.output}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("architecture", ["bert", "roberta", "xlm-roberta"])
def test_slimming_does_not_change_the_function(architecture: str, pooling: Pooling, tmp_path: Path) -> None:
    encoder = encoder_of(architecture, pooling)
    model = whole_graph(encoder, tmp_path)
    ids, mask = pad(encoder.tokenizer.batch(CHECK_TEXTS))
    (expected,) = run(model, ids, mask)
    slim(model, encoder.backbone.config)
    assert kinds(model).count(ATTENTION) == LAYERS
    assert "Softmax" not in kinds(model)
    vectors, states = run(model, ids, mask, "last_hidden_state")
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert states.shape[1] == (1 if pooling is Pooling.CLS else ids.shape[1])


def test_the_first_layer_still_reads_every_token(tmp_path: Path) -> None:
    encoder = encoder_of("bert")
    model = whole_graph(encoder, tmp_path)
    slim(model, encoder.backbone.config)
    ids, mask = pad(encoder.tokenizer.batch(CHECK_TEXTS[:3]))
    attentions = [node.output[0] for node in model.graph.node if node.op_type == ATTENTION]
    _, first, last = run(model, ids, mask, *attentions)
    assert (first.shape[1], last.shape[1]) == (ids.shape[1], 1)


def test_a_row_of_padding_only_is_finite_and_does_not_affect_others(tmp_path: Path) -> None:
    encoder = encoder_of("bert")
    model = whole_graph(encoder, tmp_path)
    slim(model, encoder.backbone.config)
    ids, mask = pad(encoder.tokenizer.batch(CHECK_TEXTS[:2]))
    (expected,) = run(model, ids, mask)
    (vectors,) = run(model, np.pad(ids, ((0, 1), (0, 3))), np.pad(mask, ((0, 1), (0, 3))))
    assert np.isfinite(vectors).all()
    np.testing.assert_allclose(vectors[:2], expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["modernbert", "gte", "qwen3"])
def test_other_architectures_are_not_changed(architecture: str, tmp_path: Path) -> None:
    encoder = encoder_of(architecture)
    model = whole_graph(encoder, tmp_path)
    before = model.SerializeToString(deterministic=True)
    slim(model, encoder.backbone.config)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    "difference", ["states are an output", "two are pooled", "a layer is passed by", "the norm goes over tokens"]
)
def test_a_last_layer_with_another_reader_keeps_every_token(difference: str, tmp_path: Path) -> None:
    encoder = encoder_of("bert")
    model = whole_graph(encoder, tmp_path)
    if difference == "states are an output":
        states = helper.make_tensor_value_info("last_hidden_state", onnx.TensorProto.FLOAT, None)
        model.graph.output.append(states)
    elif difference == "two are pooled":
        pooling = next(node for node in model.graph.node if "last_hidden_state" in node.input)
        twin = helper.make_node("Gather", pooling.input, ["twin"], name="twin", axis=1)
        model.graph.node.append(twin)
        model.graph.output.append(helper.make_tensor_value_info("twin", onnx.TensorProto.FLOAT, None))
    elif difference == "a layer is passed by":
        norm = makers(model)["last_hidden_state"]
        beginning = next(node for node in model.graph.node if node.op_type == "LayerNormalization").output[0]
        joined = helper.make_node("Add", [norm.input[0], beginning], ["joined"], name="joined")
        model.graph.node.insert(list(model.graph.node).index(norm), joined)
        norm.input[0] = "joined"
    else:
        norm = makers(model)["last_hidden_state"]
        next(attribute for attribute in norm.attribute if attribute.name == "axis").i = 1
    slim(model, encoder.backbone.config)
    assert kinds(model).count(ATTENTION) == LAYERS
    assert not any(node.name.endswith("/first") for node in model.graph.node)


def prepared(encoder: TorchEncoder, model: ModelProto) -> ModelProto:
    slim(model, encoder.backbone.config)
    int8.prepare(model, int8.calibration_samples(encoder.tokenizer, encoder.backbone.config.vocab_size))
    return model


def test_smoothing_adds_no_node_after_attention_and_is_left_out_after_gelu(tmp_path: Path) -> None:
    encoder = encoder_of("bert")
    model = whole_graph(encoder, tmp_path)
    ids, mask = pad(encoder.tokenizer.batch(CHECK_TEXTS))
    (expected,) = run(model, ids, mask)
    table = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    prepared(encoder, model)
    made = makers(model)
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    sources = [made[node.input[0]].op_type for node in products]
    # A layer's query, key, value and first feed-forward product read smoothed inputs; the last layer's query its own.
    assert sorted(sources) == sorted([ATTENTION, "Gelu", *["Mul"] * 4] * LAYERS)
    output = next(node for node in products if made[node.input[0]].op_type == ATTENTION)
    smoothed = next(tensor for tensor in model.graph.initializer if tensor.name == output.input[1])
    assert not np.allclose(numpy_helper.to_array(smoothed), table[output.input[1]])
    (vectors,) = run(model, ids, mask)
    assert np.sum(vectors * expected, axis=1).mean() > 0.9999  # only the embedding tables are rounded


def test_a_value_weight_shared_by_layers_is_smoothed_by_an_extra_node(tmp_path: Path) -> None:
    encoder = encoder_of("bert")
    with torch.no_grad():
        first, second = (layer.attention.self.value.weight for layer in encoder.backbone.encoder.layer)
        second.copy_(first)  # the exporter writes equal weights once
    model = whole_graph(encoder, tmp_path)
    ids, mask = pad(encoder.tokenizer.batch(CHECK_TEXTS))
    (expected,) = run(model, ids, mask)
    prepared(encoder, model)
    divided = [n for n in model.graph.node if n.op_type == "Mul" and makers(model)[n.input[0]].op_type == ATTENTION]
    assert len(divided) == LAYERS
    (vectors,) = run(model, ids, mask)
    assert np.sum(vectors * expected, axis=1).mean() > 0.9999
