"""Makes the int8 variant of a graph: smoothing, then quantisation (docs/adr/0002-export-split.md).

Dynamic quantisation has one scale for a whole activation tensor, and a few channels of a transformer's hidden states
are tens of times larger than the rest. So each channel is divided by a factor that the next weights take up.
Embedding tables get one scale a row; ONNX Runtime's own quantiser gives them one in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
