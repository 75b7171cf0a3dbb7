"""Makes the int8 variant of a graph: smoothing, then quantisation (docs/adr/0002-export-split.md).

Dynamic quantisation has one scale for a whole activation tensor, and a few channels of a transformer's hidden states
are tens of times larger than the rest. So each channel is divided by a factor that the next weights take up; behind a
Gelu, where that does not help, the largest channels are computed in float.
Embedding tables get one scale a row; ONNX Runtime's own quantiser gives them one in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

from models.encoder.tokenizer import Tokenizer, Tokens, pad
from models.export.backbone import IDS, MASK
from models.export.fusions import ATTENTION, quiet
from models.export.parity import CALIBRATION_TEXTS

Floats = NDArray[np.float32]

# How much of the range moves from activations to weights. On bge-small-zh, mean cosine of batches: unsmoothed 0.991,
# 0.5 0.991, 0.65 0.997, 0.75 0.997, 0.8 0.995.
STRENGTH = 0.65
RANDOM_SAMPLES = 60
RANDOM_LENGTH = 126
BATCH = 8
# How many channels behind a Gelu are set apart, and how far above all others the largest must be. In layers 2 and 3 of
# bge-small-zh one or two are three to seven times as large, at the separator of every text.
SET_APART, OUTLYING = 16, 2.0
FEW = "/few"
"""How the names of products end that stay in float."""
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
    graph = _Graph(model)
    products = _products(graph)
    peaks = _peaks(model, list(products), samples) if products else {}
    for activation, nodes in products.items():
        if graph.makes(activation, "Concat") is not None:
            # Hidden units beside the pooled vector: large parts cancel, and int8 was seen to ruin what is left.
            for node in nodes:
                node.name += FEW
        elif graph.makes(activation, "Gelu") is None:
            _smooth(graph, activation, nodes, peaks[activation])
        else:
            _set_apart(graph, activation, nodes, peaks[activation])
    graph.add_nodes()
    _quantize_tables(model)


def quantize(source: Path, target: Path) -> None:
    """Weights per channel, in seven bits: with eight, sums overflow in the kernels of x86 CPUs without VNNI.

    Seven bits cost 0.001 of cosine and make the graph the same function on every CPU.
    """
    floats = [node.name for node in onnx.load(source, load_external_data=False).graph.node if node.name.endswith(FEW)]
    bits = {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8}
    with quiet():
        quantize_dynamic(source, target, op_types_to_quantize=["MatMul"], nodes_to_exclude=floats, **bits)


class _Graph:
    """A graph's weights by name, how often each name is read, and the node that makes each name."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self.uses = Counter(name for node in model.graph.node for name in node.input)
        self.makers = {name: node for node in model.graph.node for name in node.output}
        self._added: dict[str, list[NodeProto]] = {}

    def makes(self, name: str, kind: str) -> NodeProto | None:
        """The node of this kind that makes an activation; None if another one does."""
        node = self.makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def linear(self, name: str) -> tuple[NodeProto, TensorProto, TensorProto] | None:
        """The product, weight and bias that make an activation; None if something else does, or also reads them."""
        added = self.makes(name, "Add")
        for inner, bias in (added.input, added.input[::-1]) if added is not None else ():
            product = self.makes(inner, "MatMul")
            if product is not None and bias in self.weights and product.input[1] in self.weights:
                alone = all(self.uses[each] == 1 for each in (name, inner, bias, product.input[1]))
                return (product, self.weights[product.input[1]], self.weights[bias]) if alone else None
        return None

    def add(self, after: str, kind: str | NodeProto, inputs: Sequence[str | ArrayLike], name: str) -> str:
        """Adds a node behind the one that makes `after`; an array among its inputs becomes a weight.

        `kind` may be a node to copy with its attributes.
        """
        weight = f"{name}/weight"
        names = [given if isinstance(given, str) else weight for given in inputs]
        for array in (np.ascontiguousarray(given, np.float32) for given in inputs if not isinstance(given, str)):
            self.model.graph.initializer.append(numpy_helper.from_array(array, weight))
        node = NodeProto()
        node.CopyFrom(helper.make_node(kind, [], []) if isinstance(kind, str) else kind)
        node.name, node.input[:], node.output[:] = name, names, [name]
        self._added.setdefault(after, []).append(node)
        return name

    def add_nodes(self) -> None:
        """Writes the nodes that were added into the graph."""
        nodes = list(self.model.graph.node)
        del self.model.graph.node[:]
        for node in nodes:
            self.model.graph.node.append(node)
            self.model.graph.node.extend(new for name in node.output for new in self._added.get(name, ()))


def _products(graph: _Graph) -> dict[str, list[NodeProto]]:
    """Products with weights, by the activation that they read."""
    products: dict[str, list[NodeProto]] = {}
    for node in graph.model.graph.node:
        # A weight that several layers share can follow only one of them.
        if node.op_type == "MatMul" and node.input[1] in graph.weights and graph.uses[node.input[1]] == 1:
            products.setdefault(node.input[0], []).append(node)
    return products


def _smooth(graph: _Graph, activation: str, nodes: list[NodeProto], peaks: Floats) -> None:
    """Divides each channel of an activation by a factor that the next weights take up."""
    tables = [numpy_helper.to_array(graph.weights[node.input[1]]) for node in nodes]
    largest = np.max([np.abs(table).max(axis=1) for table in tables], axis=0)
    ratios = np.maximum(peaks, 1e-5) ** STRENGTH / np.maximum(largest, 1e-5) ** (1 - STRENGTH)
    factors = np.asarray(ratios / np.exp(np.log(ratios).mean()), dtype=np.float32)
    for node, table in zip(nodes, tables, strict=True):
        _set(graph.weights[node.input[1]], table * factors[:, None])
    attention = graph.makes(activation, ATTENTION)
    values = graph.linear(attention.input[2]) if attention is not None else None
    if values is not None and graph.uses[activation] == len(nodes):
        # What an attention gives is linear in its values, channel by channel: they take the division.
        for tensor in values[1:]:
            _set(tensor, numpy_helper.to_array(tensor) / factors)
        return
    smoothed = graph.add(activation, "Mul", [activation, 1 / factors], f"{activation}/smoothed")
    for node in nodes:
        node.input[0] = smoothed


def _set_apart(graph: _Graph, activation: str, nodes: list[NodeProto], peaks: Floats) -> None:
    """Computes the largest channels behind a Gelu in float, beside the others, if they would stretch the scale.

    Smoothing was seen to cost time and closeness there (docs/adr/0002-export-split.md).
    """
    gelu, order = graph.makers[activation], np.argsort(-peaks)
    few, rest = np.sort(order[:SET_APART]), np.sort(order[SET_APART:])
    first = graph.linear(gelu.input[0])
    if first is None or graph.uses[activation] > 1 or not len(rest) or peaks[few].max() < OUTLYING * peaks[rest].max():
        return
    (before, wide, bias), (second,) = first, nodes
    narrow = graph.weights[second.input[1]]
    into, shift, out = (numpy_helper.to_array(tensor) for tensor in (wide, bias, narrow))
    _set(wide, into[:, rest])
    _set(bias, shift[rest])
    _set(narrow, out[rest])
    # Behind the second product's bias, which is a part of its kernel.
    reader = next((node for node in graph.model.graph.node if second.output[0] in node.input), second)
    last = reader if graph.linear(reader.output[0]) is not None else second
    whole, most = last.output[0], f"{last.output[0]}/most"
    last.output[0] = most
    hidden = graph.add(most, "MatMul", [before.input[0], into[:, few]], f"{whole}/into{FEW}")
    hidden = graph.add(most, "Add", [hidden, shift[few]], f"{whole}/bias{FEW}")
    hidden = graph.add(most, gelu, [hidden], f"{whole}/gelu{FEW}")
    hidden = graph.add(most, "MatMul", [hidden, out[few]], f"{whole}/out{FEW}")
    graph.add(most, "Add", [most, hidden], whole)


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
