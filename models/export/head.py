"""The end of every graph: pooling, truncation to dim, L2 norm. Written once, whoever exported the backbone.

`models.torch_encoder.embed` is the same function in torch; the parity check holds the two together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.transformers.onnx_model import OnnxModel

from models.export.errors import ExportError
from models.spec import EncoderSpec, Pooling

HIDDEN = "last_hidden_state"
# What exporters call the hidden states: transformers' tasks, and sentence-transformers' own.
HIDDEN_NAMES = (HIDDEN, "token_embeddings")
EMBEDDING = "embedding"
IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "position_ids"
FUSED_DOMAIN = "com.microsoft"  # fused graphs use it, and not all that fuse declare it
FIRST_OPSET = 13  # the first whose ReduceSum takes its axes as an input
EPSILON = 1e-12  # that of torch.nn.functional.normalize


class _Nodes:
    """Collects nodes and constants; the prefix keeps their names apart from those of the backbone."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []

    def add(self, op: str, *inputs: str, output: str | None = None, **attributes: int) -> str:
        name = f"{self._prefix}/{op}_{len(self.nodes)}"
        node = helper.make_node(op, list(inputs), [output or name], name=name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return output or name

    def constant(self, value: float | list[int], kind: int = TensorProto.INT64) -> str:
        name = f"{self._prefix}/constant_{len(self.constants)}"
        values = value if isinstance(value, list) else [value]
        self.constants.append(helper.make_tensor(name, kind, [len(values)] if isinstance(value, list) else [], values))
        return name

    def array(self, values: NDArray[np.float32]) -> str:
        name = f"{self._prefix}/constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name


def append_head(model: ModelProto, spec: EncoderSpec, projection: NDArray[np.float32] | None = None) -> None:
    """Makes a backbone graph the whole function, in place.

    input_ids and attention_mask (texts, tokens) in, embedding (texts, dim) out in float32. A projection (native_dim,
    width of the backbone) comes between pooling and truncation.
    """
    graph = model.graph
    hidden = next((output.name for output in graph.output if output.name in HIDDEN_NAMES), None)
    if hidden is None:
        found = ", ".join(output.name for output in graph.output)
        raise ExportError(f"the graph gives {found}, not {' or '.join(HIDDEN_NAMES)}: export the bare backbone")
    _check_inputs(model)
    before, after = _Nodes("head/in"), _Nodes("head/out")
    _derive_inputs(before, {value.name for value in graph.input})
    _embed(after, hidden, spec, projection)
    for node in reversed(before.nodes):
        graph.node.insert(0, node)
    graph.node.extend(after.nodes)
    graph.initializer.extend([*before.constants, *after.constants])
    inputs = [value for value in graph.input if value.name in (IDS, MASK)]
    del graph.input[:], graph.output[:]
    graph.input.extend(inputs)
    graph.output.append(helper.make_tensor_value_info(EMBEDDING, TensorProto.FLOAT, ["batch", spec.dim]))
    if all(opset.domain != FUSED_DOMAIN for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(FUSED_DOMAIN, 1))
    OnnxModel(model).prune_graph(allow_remove_graph_inputs=False)


def _check_inputs(backbone: ModelProto) -> None:
    version = next(opset.version for opset in backbone.opset_import if opset.domain in ("", "ai.onnx"))
    if version < FIRST_OPSET:
        raise ExportError(f"the graph is of opset {version}: export it with opset {FIRST_OPSET} or newer")
    names = {value.name for value in backbone.graph.input}
    if names - {IDS, MASK, TYPES, POSITIONS} or not {IDS, MASK} <= names:
        raise ExportError(f"the graph takes {', '.join(sorted(names))}: an encoder takes {IDS} and {MASK}")


def _derive_inputs(added: _Nodes, names: set[str]) -> None:
    """Inputs that follow from ids and mask are computed inside: every token is of type 0, positions count the mask."""
    if TYPES in names:
        added.add("Sub", IDS, IDS, output=TYPES)
    if POSITIONS in names:
        counted = added.add("CumSum", MASK, added.constant(1))
        added.add("Max", added.add("Sub", counted, added.constant(1)), added.constant(0), output=POSITIONS)


def _embed(added: _Nodes, hidden: str, spec: EncoderSpec, projection: NDArray[np.float32] | None) -> None:
    pooled = _pool(added, hidden, spec.pooling)
    if projection is not None:
        pooled = added.add("MatMul", pooled, added.array(projection.T))
    bounds = [added.constant([place]) for place in (0, spec.dim, 1)]
    if not spec.normalize:
        added.add("Slice", pooled, *bounds, output=EMBEDDING)
        return
    cut = added.add("Slice", pooled, *bounds)
    squares = added.add("ReduceSum", added.add("Mul", cut, cut), added.constant([1]), keepdims=1)
    length = added.add("Max", added.add("Sqrt", squares), added.constant(EPSILON, TensorProto.FLOAT))
    added.add("Div", cut, length, output=EMBEDDING)


def _pool(added: _Nodes, hidden: str, pooling: Pooling) -> str:
    """The pooled states (texts, native_dim) in float32, also of hidden states in half precision."""
    if pooling is Pooling.CLS:
        return added.add("Cast", added.add("Gather", hidden, added.constant(0), axis=1), to=TensorProto.FLOAT)
    if pooling is Pooling.EOS:
        # The count of real tokens first reaches its maximum at the last of them, whichever side is padded.
        count = added.add("Cast", added.add("CumSum", MASK, added.constant(1)), to=TensorProto.FLOAT)
        last = added.add("ArgMax", count, axis=1, keepdims=1)
        return added.add("Cast", added.add("GatherND", hidden, last, batch_dims=1), to=TensorProto.FLOAT)
    weights = added.add("Cast", added.add("Unsqueeze", MASK, added.constant([2])), to=TensorProto.FLOAT)
    states = added.add("Mul", added.add("Cast", hidden, to=TensorProto.FLOAT), weights)
    tokens = added.add("ReduceSum", weights, added.constant([1]), keepdims=0)
    total = added.add("ReduceSum", states, added.constant([1]), keepdims=0)
    return added.add("Div", total, added.add("Max", tokens, added.constant(1.0, TensorProto.FLOAT)))
