"""Fuses a graph's operations: fewer of them for int8 on a CPU, ONNX Runtime's own and float16 for a GPU.

docs/adr/0002-export-split.md says why and what it brings.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_by_fusion, optimize_model
from transformers import PretrainedConfig

ATTENTION = "MultiHeadAttention"
# Architectures whose attention ONNX Runtime's fusion was seen to recognise; in others it would fuse only fragments.
FUSED = frozenset({"bert", "roberta", "xlm-roberta"})
# Operations of ONNX Runtime alone that give what a product reads: ONNX cannot tell its type.
UNTYPED = frozenset({ATTENTION, "Gelu"})
# Where an attention takes the bias of queries, keys and values, one after the other.
BIAS = 3


def slim(model: ModelProto, config: PretrainedConfig) -> None:
    """Makes a whole graph of a known architecture cheaper, before any smoothing."""
    if config.model_type not in FUSED:
        return
    _fuse(model, config.num_attention_heads, config.hidden_size)
    _hand_back_biases(model.graph)
    _read_first_token(model.graph)
    # What was declared of the old tensors no longer holds; the quantiser asks for the types of these.
    del model.graph.value_info[:]
    model.graph.value_info.extend(
        helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
        for node in model.graph.node
        if node.op_type in UNTYPED
    )


def _read_first_token(graph: GraphProto) -> None:
    """With CLS pooling, the last layer's queries, output and feed-forward become those of the first token alone.

    Goes backwards from the pooling for as long as a tensor is read by nothing else and each of its tokens is computed
    apart from the others. That must end at one tensor, the last layer's input, beyond one attention.
    """
    reads = Counter([name for node in graph.node for name in node.input] + [value.name for value in graph.output])
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    pooled = [node.input[0] for node in graph.node if _is_pooling(node, graph)]
    # How often a tensor is read for its first token alone.
    narrow = Counter(pooled)
    layer: list[tuple[NodeProto, list[int]]] = []
    for node in reversed(graph.node):
        places = _token_inputs(node, ranks)
        if places and 0 < narrow[node.output[0]] == reads[node.output[0]]:
            del narrow[node.output[0]]
            narrow.update(node.input[place] for place in places)
            layer.append((node, places))
    if len(pooled) != 1 or len(narrow) != 1 or [node.op_type for node, _ in layer].count(ATTENTION) != 1:
        return
    (states,) = narrow
    first, index = f"{states}/first", f"{states}/first_index"
    for node, places in layer:
        for place in places:
            if node.input[place] == states:
                node.input[place] = first
    graph.initializer.append(numpy_helper.from_array(np.array([0]), index))
    maker = next(place for place, node in enumerate(graph.node) if states in node.output)
    graph.node.insert(maker + 1, helper.make_node("Gather", [states, index], [first], name=first, axis=1))


def _fuse(model: ModelProto, heads: int, width: int) -> None:
    """Fuses attention into one node. It counts each text's tokens, so texts must be padded on the right."""
    options = FusionOptions("bert")
    options.use_multi_head_attention = True
    # These are slower on a CPU than their parts, or hide from the quantiser what it should see.
    options.enable_skip_layer_norm = False
    options.enable_bias_skip_layer_norm = False
    options.enable_embed_layer_norm = False
    options.enable_bias_gelu = False
    optimize_by_fusion(model, "bert", heads, width, options)


def _hand_back_biases(graph: GraphProto) -> None:
    """Moves the biases that the fusion gave to the attentions to the products before them, which add them for free."""
    biases = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        bias = biases.get(node.input[BIAS]) if node.op_type == ATTENTION else None
        if bias is not None:
            for place, part in enumerate(np.split(numpy_helper.to_array(bias), 3)):
                name, biased = f"{bias.name}/{place}", f"{node.input[place]}/biased"
                graph.initializer.append(numpy_helper.from_array(part, name))
                nodes.append(helper.make_node("Add", [node.input[place], name], [biased], name=biased))
                node.input[place] = biased
            node.input[BIAS] = ""
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _is_pooling(node: NodeProto, graph: GraphProto) -> bool:
    if node.op_type != "Gather" or _attribute(node, "axis", 0) != 1:
        return False
    index = next((tensor for tensor in graph.initializer if tensor.name == node.input[1]), None)
    return index is not None and not numpy_helper.to_array(index).any()


def _token_inputs(node: NodeProto, ranks: dict[str, int]) -> list[int]:
    """The inputs that hold a row a token, of a node that gives each token's row from theirs alone; else none."""
    constant = [name in ranks for name in node.input]
    match node.op_type:
        case "Gelu":
            return [0]
        case "MatMul" if constant == [False, True]:
            return [0]
        case "LayerNormalization" if _attribute(node, "axis", -1) == -1 and not constant[0]:
            return [0]
        case "Add" if all(ranks.get(name, 0) <= 1 for name in node.input):
            return [place for place, fixed in enumerate(constant) if not fixed]
        case "MultiHeadAttention" if not any(node.input[5:]):
            return [0]
    return []


def _attribute(node: NodeProto, name: str, default: int) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def fuse(backbone: Path, config: PretrainedConfig) -> ModelProto:
    """Fusions by ONNX Runtime, then float16 throughout, hidden states included.

    BERT and XLM-R fuse whole (Attention, EmbedLayerNormalization, SkipLayerNormalization, BiasGelu); others keep
    their attention as it is. The fused attention counts each text's tokens, so texts must be padded on the right.
    """
    with quiet(), warnings.catch_warnings():
        # Mask constants of −3e38 become the smallest half, which masks as well.
        warnings.simplefilter("ignore")
        shape = {"num_heads": config.num_attention_heads, "hidden_size": config.hidden_size}
        graph = optimize_model(str(backbone), model_type="bert", opt_level=0, **shape)
        graph.convert_float_to_float16(keep_io_types=False, use_symbolic_shape_infer=True)
    model: ModelProto = graph.model
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Holds back the root logger: the quantiser and the fusions remark on every node they pass by."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(before)
