"""Makes the fp16 and int8 variants of a graph: fusions, smoothing, quantisation (docs/adr/0002-export-split.md).

Dynamic quantisation has one scale for a whole activation tensor, and a few channels of a transformer's hidden states
are tens of times larger than the rest. So each channel is divided by a factor that the next weights take up.
Embedding tables get one scale a row; ONNX Runtime's own quantiser gives them one in all.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_by_fusion, optimize_model
from transformers import PretrainedConfig

from models.encoder.tokenizer import Tokenizer, Tokens, pad
from models.export.backbone import IDS, MASK
from models.export.parity import CALIBRATION_TEXTS

Floats = NDArray[np.float32]

# How much of the range moves from activations to weights. On bge-small-zh, mean cosine of batches: unsmoothed 0.991,
# 0.5 0.991, 0.65 0.997, 0.75 0.997, 0.8 0.995.
STRENGTH = 0.65
RANDOM_SAMPLES = 60
RANDOM_LENGTH = 126
BATCH = 8
# Smaller tables (token types) weigh nothing.
SMALLEST_TABLE = 256


def calibration_samples(tokenizer: Tokenizer, vocabulary: int) -> list[Tokens]:
    """Real texts, and random ids: rare tokens are where the largest activations are, and few texts hold them."""
    random = np.random.default_rng(0)
    empty = tokenizer("").ids
    longest = min(RANDOM_LENGTH, tokenizer.max_length - len(empty))
    shortest = min(2, longest)
    samples = tokenizer.batch(CALIBRATION_TEXTS)
    for length in random.integers(shortest, max(longest, shortest + 1), size=RANDOM_SAMPLES):
        ids = random.integers(0, vocabulary, size=length).tolist()
        samples.append(Tokens([*empty[:-1], *ids, *empty[-1:]], truncated=False))
    return samples


def prepare(model: ModelProto, samples: Sequence[Tokens]) -> None:
    """Smooths the activations of a graph of ids and mask and gives it row-wise int8 tables, in place."""
    _smooth(model, samples)
    _quantize_tables(model)


def quantize(source: Path, target: Path) -> None:
    """Weights per channel, in seven bits: with eight, sums overflow in the kernels of x86 CPUs without VNNI.

    Seven bits cost 0.001 of cosine and make the graph the same function on every CPU.
    """
    bits = {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8}
    with quiet():
        quantize_dynamic(source, target, op_types_to_quantize=["MatMul"], **bits)


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


def _smooth(model: ModelProto, samples: Sequence[Tokens]) -> None:
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    uses = Counter(name for node in model.graph.node for name in node.input)
    makers = {name: node for node in model.graph.node for name in node.output}
    readers = _products(model, weights, uses, makers)
    peaks = _peaks(model, list(readers), samples) if readers else {}
    divisions: dict[str, NodeProto] = {}
    for activation, nodes in readers.items():
        tables = [numpy_helper.to_array(weights[node.input[1]]) for node in nodes]
        largest = np.max([np.abs(table).max(axis=1) for table in tables], axis=0)
        ratios = np.maximum(peaks[activation], 1e-5) ** STRENGTH / np.maximum(largest, 1e-5) ** (1 - STRENGTH)
        factors = np.asarray(ratios / np.exp(np.log(ratios).mean()), dtype=np.float32)
        for node, table in zip(nodes, tables, strict=True):
            _set(weights[node.input[1]], table * factors[:, None])
        values = _values(activation, len(nodes), weights, uses, makers)
        if values is not None:
            # What an attention gives is linear in its values, channel by channel: they take the division.
            for tensor in values:
                _set(tensor, numpy_helper.to_array(tensor) / factors)
            continue
        smoothed, inverse = f"{activation}/smoothed", f"{activation}/inverse"
        model.graph.initializer.append(numpy_helper.from_array(1 / factors, inverse))
        divisions[activation] = helper.make_node("Mul", [activation, inverse], [smoothed], name=smoothed)
        for node in nodes:
            node.input[0] = smoothed
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        model.graph.node.append(node)
        model.graph.node.extend(divisions[name] for name in node.output if name in divisions)


def _products(
    model: ModelProto, weights: Mapping[str, TensorProto], uses: Counter[str], makers: Mapping[str, NodeProto]
) -> dict[str, list[NodeProto]]:
    """Products with weights, by the activation that they read and that is worth smoothing."""
    readers: dict[str, list[NodeProto]] = {}
    for node in model.graph.node:
        # A weight that several layers share can follow only one of them.
        if node.op_type != "MatMul" or node.input[1] not in weights or uses[node.input[1]] > 1:
            continue
        # Behind a Gelu smoothing was seen to cost time and closeness (docs/adr/0002-export-split.md).
        if node.input[0] not in makers or makers[node.input[0]].op_type != "Gelu":
            readers.setdefault(node.input[0], []).append(node)
    return readers


def _values(
    activation: str, readers: int, weights: Mapping[str, TensorProto], uses: Counter[str],
    makers: Mapping[str, NodeProto],
) -> tuple[TensorProto, TensorProto] | None:  # fmt: skip
    """Weight and bias of the values of the attention that gives an activation.

    None if the activation comes from elsewhere, or if anything else reads it or them.
    """
    attention = makers.get(activation)
    if attention is None or attention.op_type != ATTENTION or uses[activation] > readers:
        return None
    biased = makers.get(attention.input[2])
    product = makers.get(biased.input[0]) if biased is not None and biased.op_type == "Add" else None
    if biased is None or product is None or product.op_type != "MatMul":
        return None
    names = product.input[1], biased.input[1]
    alone = all(uses[name] == 1 for name in (*names, product.output[0], biased.output[0]))
    return (weights[names[0]], weights[names[1]]) if alone and all(name in weights for name in names) else None


def _set(tensor: TensorProto, values: ArrayLike) -> None:
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values, dtype=np.float32), tensor.name))


def _peaks(model: ModelProto, activations: list[str], samples: Sequence[Tokens]) -> dict[str, Floats]:
    """Returns the largest magnitude of each channel of each activation over the samples.

    Padding counts: what stands there takes part in the scale of every batch that is served.
    """
    kept = len(model.graph.output)
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in activations)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # By way of a file, because a copy in memory costs as much again as the weights.
    with TemporaryDirectory() as folder:
        onnx.save(model, f"{folder}/probe.onnx")
        session = ort.InferenceSession(f"{folder}/probe.onnx", options, providers=["CPUExecutionProvider"])
    del model.graph.output[kept:]
    peaks: dict[str, Floats] = {}
    for start in range(0, len(samples), BATCH):
        ids, mask = pad(samples[start : start + BATCH])
        values = session.run(activations, {IDS: ids, MASK: mask})
        for name, value in zip(activations, values, strict=True):
            channels = np.abs(value).reshape(-1, value.shape[-1]).max(axis=0)
            peaks[name] = np.maximum(peaks.get(name, channels), channels)
    return peaks


def _quantize_tables(model: ModelProto) -> None:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = list(model.graph.node)
    del model.graph.node[:]
    done: set[str] = set()
    for node in nodes:
        table = tensors.get(node.input[0]) if node.op_type == "Gather" else None
        if (
            table is None
            or table.data_type != TensorProto.FLOAT
            or len(table.dims) != 2
            or table.dims[0] < SMALLEST_TABLE
        ):
            model.graph.node.append(node)
            continue
        rows, scales = f"{table.name}/rows", f"{table.name}/scales"
        if table.name not in done:
            quantised, scale = quantise_rows(numpy_helper.to_array(table))
            model.graph.initializer.extend(
                [numpy_helper.from_array(quantised, rows), numpy_helper.from_array(scale, scales)]
            )
            done.add(table.name)
        model.graph.node.extend(gather_rows(node, rows, scales))
    read = {name for node in model.graph.node for name in node.input}
    for name in done - read:
        model.graph.initializer.remove(tensors[name])


def quantise_rows(values: NDArray[Any]) -> tuple[NDArray[np.int8], Floats]:
    """Returns a table (rows, width) in int8, and the scale of each row (rows, 1)."""
    scale = np.maximum(np.abs(values).max(axis=1, keepdims=True) / 127, 1e-12).astype(np.float32)
    return np.round(values / scale).astype(np.int8), scale


def gather_rows(node: NodeProto, rows: str, scales: str) -> list[NodeProto]:
    """Gathers int8 rows and their scales, and multiplies them."""
    ids, output = node.input[1], node.output[0]
    own, floats, factors = f"{output}/rows", f"{output}/floats", f"{output}/scales"
    return [
        helper.make_node("Gather", [rows, ids], [own], name=own),
        helper.make_node("Cast", [own], [floats], name=floats, to=TensorProto.FLOAT),
        helper.make_node("Gather", [scales, ids], [factors], name=factors),
        helper.make_node("Mul", [floats, factors], [output], name=f"{output}/scaled"),
    ]


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
