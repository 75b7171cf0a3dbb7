"""The head as ONNX nodes against the head in torch, on a backbone that is only a table of states."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from models.encoder.spec import POOLINGS, EncoderSpec, Pooling
from models.encoder.torch import Projection, embed, finish
from models.errors import ExportError
from models.export.backbone import append_head
from tests.support.tiny_models import WIDTH, tiny_spec

TABLE = np.random.default_rng(0).normal(size=(20, WIDTH)).astype(np.float32)


def table_backbone(
    inputs: tuple[str, ...] = ("input_ids", "attention_mask"),
    output: str = "last_hidden_state",
    kind: int = TensorProto.FLOAT,
    opset: int = 18,
) -> ModelProto:
    """Makes hidden = table[ids] + types + positions, for the inputs that there are, and an unused output."""
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["h0"])]
    for place, name in enumerate(name for name in inputs if name in ("token_type_ids", "position_ids")):
        nodes.append(helper.make_node("Unsqueeze", [name, "axis"], [f"{name}/wide"]))
        nodes.append(helper.make_node("Cast", [f"{name}/wide"], [f"{name}/float"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Add", [f"h{place}", f"{name}/float"], [f"h{place + 1}"]))
    last = f"h{(len(nodes) - 1) // 3}"
    nodes.append(helper.make_node("Cast", [last], [output], to=kind))
    nodes.append(helper.make_node("Mul", [last, "unused"], ["pooler_output"]))
    shape = ["batch", "sequence"]
    graph = helper.make_graph(
        nodes,
        "table",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in inputs],
        [
            helper.make_tensor_value_info("pooler_output", TensorProto.FLOAT, [*shape, WIDTH]),
            helper.make_tensor_value_info(output, kind, [*shape, WIDTH]),
        ],
        [
            numpy_helper.from_array(TABLE, "table"),
            numpy_helper.from_array(np.array([2]), "axis"),
            numpy_helper.from_array(np.ones(WIDTH, np.float32), "unused"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def run(model: ModelProto, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [value.name for value in session.get_outputs()] == ["embedding"]
    (vectors,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
    return np.asarray(vectors)


def with_head(model: ModelProto, spec: EncoderSpec) -> ModelProto:
    append_head(model, spec)
    return model


IDS = np.array([[4, 7, 9, 2, 0], [5, 0, 0, 0, 0], [1, 2, 3, 4, 5]])
RIGHT = np.array([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
LEFT = RIGHT[:, ::-1].copy()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("mask", [RIGHT, LEFT], ids=["right", "left"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_head_equals_that_of_torch(pooling: Pooling, mask: np.ndarray, normalize: bool) -> None:
    spec = tiny_spec("bert", pooling, dim=10).model_copy(update={"normalize": normalize})
    expected = embed(torch.from_numpy(TABLE[IDS]), torch.from_numpy(mask), spec).numpy()
    np.testing.assert_allclose(run(with_head(table_backbone(), spec), IDS, mask), expected, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("hidden", [0, 40])
def test_a_projection_comes_before_truncation(bias: bool, tanh: bool, hidden: int) -> None:
    torch.manual_seed(1)
    projection = Projection(WIDTH, 96, hidden=hidden, bias=bias, tanh=tanh)
    spec = tiny_spec("bert").model_copy(update={"native_dim": 96, "dim": 70})
    model = table_backbone()
    append_head(model, spec, projection)
    with torch.no_grad():
        expected = finish(projection(torch.from_numpy(TABLE[IDS][:, 0])), spec).numpy()
    np.testing.assert_allclose(run(model, IDS, RIGHT), expected, atol=1e-5)


def test_token_types_are_zero_and_positions_are_counted_by_the_mask() -> None:
    inputs = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    spec = tiny_spec("bert", Pooling.EOS)
    model = with_head(table_backbone(inputs), spec)
    for mask in (RIGHT, LEFT):
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
        hidden = torch.from_numpy(TABLE[IDS] + positions[..., None].astype(np.float32))
        expected = embed(hidden, torch.from_numpy(mask), spec).numpy()
        np.testing.assert_allclose(run(model, IDS, mask), expected, atol=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_half_precision_states_give_float32_embeddings(pooling: Pooling) -> None:
    spec = tiny_spec("bert", pooling)
    vectors = run(with_head(table_backbone(kind=TensorProto.FLOAT16), spec), IDS, RIGHT)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)


def test_other_outputs_and_their_nodes_are_dropped() -> None:
    model = with_head(table_backbone(output="token_embeddings"), tiny_spec("bert"))
    assert "unused" not in {tensor.name for tensor in model.graph.initializer}


def test_a_zero_state_stays_finite() -> None:
    backbone = table_backbone()
    backbone.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros_like(TABLE), "table"))
    assert not run(with_head(backbone, tiny_spec("bert")), IDS, RIGHT).any()


def test_graphs_that_are_not_a_backbone_are_refused() -> None:
    spec = tiny_spec("bert")
    with pytest.raises(ExportError, match="sentence_embedding, not last_hidden_state"):
        append_head(table_backbone(output="sentence_embedding"), spec)
    with pytest.raises(ExportError, match="takes attention_mask, input_ids, past_key"):
        append_head(table_backbone(("input_ids", "attention_mask", "past_key")), spec)
    with pytest.raises(ExportError, match="takes input_ids"):
        append_head(table_backbone(("input_ids",)), spec)
    with pytest.raises(ExportError, match="opset 11"):
        append_head(table_backbone(opset=11), spec)
