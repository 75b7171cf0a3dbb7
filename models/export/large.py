"""Writes ONNX graphs above 2 GiB: a small graph, and its weights in one file beside it (external data).

The graph is traced without weights. They are then written one by one from torch, in the numbers of the variant, so no
file in other numbers is made on the way, and no second copy of all weights is in memory. int8 is of the weights alone,
in blocks: smoothing and dynamic quantisation (`variants`) need the whole graph in memory several times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from transformers import PreTrainedModel

from models.encoder.spec import DATA_SUFFIX, Variant
from models.export.backbone import FUSED_DOMAIN, trace_backbone
from models.export.int8 import SMALLEST_TABLE, gather_rows, quantise_rows

Array = NDArray[Any]

# Operating systems map files in pages.
ALIGNMENT = 4096
# Smaller tensors stay in the graph.
SMALLEST_BYTES = 1024
BLOCK, BITS, ZERO = 32, 8, 128
# Activations are rounded to int8 a block at a time, too: without it the kernel computes in fp32 and takes longer.
INT8_ACTIVATIONS = 4
CHECKSUM = "care_data_sha256"


def write_large(backbone: PreTrainedModel, append: Callable[[ModelProto], None], variant: Variant, path: Path) -> None:
    """Writes the graph of one variant to `path`, and its weights beside it. fp16 halves the backbone in place.

    `append` makes the whole function of the backbone's graph.
    """
    if variant is Variant.FP16:
        # Weights alone: rotary frequencies in half precision would put far tokens in wrong places.
        for weight in backbone.parameters():
            weight.data = weight.data.to(torch.float16)
    model, weights = trace_backbone(backbone)
    append(model)
    with path.with_name(path.name + DATA_SUFFIX).open("wb") as file:
        data = DataFile(file)
        _Filler(model, weights, data, quantised=variant is Variant.INT8).fill()
    # The checksum of the graph, which names the encoder, must differ with the weights.
    helper.set_model_props(model, {CHECKSUM: data.checksum})
    onnx.save(model, path)


class DataFile:
    """Writes tensors one after the other; `checksum` is that of the whole file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    @property
    def checksum(self) -> str:
        return self._hash.hexdigest()

    def add(self, name: str, values: Array) -> TensorProto:
        """Returns the tensor for the graph: by its place in this file, unless it is small."""
        if values.nbytes < SMALLEST_BYTES:
            return numpy_helper.from_array(values, name)
        self._write(b"\0" * (-self._file.tell() % ALIGNMENT))
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=values.shape, data_location=TensorProto.EXTERNAL)
        place = {"location": Path(self._file.name).name, "offset": self._file.tell(), "length": values.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._write(np.ascontiguousarray(values).data)
        return tensor

    def _write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hash.update(content)


class _Filler:
    """Gives a graph that was traced without weights its weights."""

    def __init__(self, model: ModelProto, weights: dict[str, torch.Tensor], data: DataFile, *, quantised: bool) -> None:
        self._graph = model.graph
        self._weights = weights
        self._data = data
        self._quantised = quantised
        # The outputs of nodes that only transpose a weight: the weight is written transposed instead.
        self._transposed = {
            node.output[0]: node.input[0]
            for node in self._graph.node
            if node.op_type == "Transpose" and node.input[0] in weights and len(weights[node.input[0]].shape) == 2
        }
        self._written: set[str] = set()

    def fill(self) -> None:
        nodes = [node for node in self._graph.node if node.output[0] not in self._transposed]
        del self._graph.node[:]
        for node in nodes:
            self._graph.node.extend(self._filled(node))

    def _filled(self, node: NodeProto) -> list[NodeProto]:
        """Returns the node with its weights, or the nodes that compute the same with int8 weights."""
        if self._quantised and node.op_type == "MatMul" and node.input[1] in self._transposed:
            return [self._product(node)]
        table = self._weights.get(node.input[0]) if self._quantised and node.op_type == "Gather" else None
        if table is not None and len(table) >= SMALLEST_TABLE:
            rows, scales = f"{node.input[0]}/rows", f"{node.input[0]}/scales"
            self._add_all(rows, lambda: dict(zip((rows, scales), quantise_rows(_array(table)), strict=True)))
            return gather_rows(node, rows, scales)
        for name in node.input:
            self._add(name)
        return [node]

    def _add(self, name: str) -> None:
        if name in self._weights:
            self._add_all(name, lambda: {name: _array(self._weights[name])})
        elif name in self._transposed:
            self._add_all(name, lambda: {name: _array(self._weights[self._transposed[name]]).T})

    def _product(self, node: NodeProto) -> NodeProto:
        """Returns a product with a weight (outputs, inputs) in blocks of int8, each with a scale of its own."""
        weight = self._weights[self._transposed[node.input[1]]]
        blocks, scales = f"{node.input[1]}/blocks", f"{node.input[1]}/scales"
        self._add_all(blocks, lambda: dict(zip((blocks, scales), quantise_blocks(_array(weight)), strict=True)))
        outputs, inputs = weight.shape
        facts = {"K": inputs, "N": outputs, "bits": BITS, "block_size": BLOCK, "accuracy_level": INT8_ACTIVATIONS}
        names = [node.input[0], blocks, scales]
        product = helper.make_node("MatMulNBits", names, node.output, name=node.name, domain=FUSED_DOMAIN)
        product.attribute.extend(helper.make_attribute(key, value) for key, value in facts.items())
        return product

    def _add_all(self, name: str, make: Callable[[], dict[str, Array]]) -> None:
        """Writes tensors once; `name` is one of them."""
        if name not in self._written:
            self._written.add(name)
            self._graph.initializer.extend(self._data.add(own, values) for own, values in make().items())


def quantise_blocks(weight: Array) -> tuple[Array, Array]:
    """Blocks (outputs, blocks, BLOCK) uint8 around ZERO, and their scales (outputs × blocks) float32."""
    outputs, inputs = weight.shape
    padded = np.pad(weight.astype(np.float32), ((0, 0), (0, -inputs % BLOCK)))
    blocks = padded.reshape(outputs, -1, BLOCK)
    scales = np.maximum(np.abs(blocks).max(axis=2, keepdims=True) / (ZERO - 1), 1e-12).astype(np.float32)
    return (np.round(blocks / scales) + ZERO).astype(np.uint8), scales.reshape(-1)


def _array(tensor: torch.Tensor) -> Array:
    values: Array = tensor.detach().cpu().numpy()
    return values
