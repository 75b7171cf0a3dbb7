"""An encoder's graph with its inputs and outputs bound to memory of the device: nothing is allocated for a batch.

Buffers are kept for a bounded number of shapes, so a batch is padded up to the next one: a graphics card computes a few
rows more in the same time. The device is a name to ONNX Runtime; the code is the same for all.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from models.encoder.tokenizer import FlatIds, Ids, TextReader

# Lengths are multiples of this; so are numbers of queries, in steps that grow.
LENGTH_STEP = 8
MOST_SHAPES = 128
# Launching the kernels of so few queries takes longer than running them: on a card they are recorded once for each
# shape and replayed. Larger batches gain nothing by it.
RECORDED_QUERIES = 8
RECORDED_TOKENS = 64
RECORDING = "gpu_graph_id"
NOT_RECORDED = -1
OUTPUT = "embedding"
NUMPY_TYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}

Vectors = NDArray[np.float32]


class Buffers:
    """Ids, mask and embeddings of one shape, in memory of the device, bound to the session."""

    def __init__(
        self, session: ort.InferenceSession, device: str, shape: tuple[int, int], dim: int, recording: int
    ) -> None:
        """`recording` numbers the kernels to record and replay; addresses are part of them, so it is this one's own."""
        (output,) = session.get_outputs()
        self._inputs = {node.name: _allocate(shape, node.type, device) for node in session.get_inputs()}
        self._embeddings = _allocate((shape[0], dim), output.type, device)
        self.binding: Any = session.io_binding()
        for name, buffer in self._inputs.items():
            self.binding.bind_ortvalue_input(name, buffer)
        self.binding.bind_ortvalue_output(OUTPUT, self._embeddings)
        self.options = ort.RunOptions()
        self.options.add_run_config_entry(RECORDING, str(recording))
        self._types = {node.name: NUMPY_TYPES[node.type] for node in session.get_inputs()}

    def fill(self, ids: Ids, mask: Ids) -> None:
        for name, values in (("input_ids", ids), ("attention_mask", mask)):
            if name in self._inputs:
                self._inputs[name].update_inplace(values.astype(self._types[name], copy=False))

    def read(self, queries: int) -> Vectors:
        # A copy: of memory that the processor can see, numpy() is a view.
        return np.array(self._embeddings.numpy()[:queries], np.float32)


class BoundEncoder:
    """Runs one session on one device; for one thread."""

    def __init__(self, reader: TextReader, session: ort.InferenceSession, device: str) -> None:
        self.reader = reader
        self._session = session
        self._device = device
        self._buffers: OrderedDict[tuple[int, int], Buffers] = OrderedDict()
        self._recorded: dict[tuple[int, int], Buffers] = {}

    def encode(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        """Unit vectors (queries, dim); `ids` holds the queries' tokens one after the other."""
        shape = next_shape(len(lengths), int(lengths.max()), self.reader.spec.max_length)
        present = np.zeros(shape, bool)
        present[: len(lengths)] = np.arange(shape[1]) < lengths[:, None]
        padded = np.zeros(shape, np.int64)
        padded[present] = ids
        # A row without a token would divide nothing by nothing.
        present[len(lengths) :, 0] = True
        buffers = self._of_shape(shape)
        buffers.fill(padded, present.astype(np.int64))
        self._session.run_with_iobinding(buffers.binding, buffers.options)
        return buffers.read(len(lengths))

    def _of_shape(self, shape: tuple[int, int]) -> Buffers:
        if shape[0] <= RECORDED_QUERIES and shape[1] <= RECORDED_TOKENS:
            if shape not in self._recorded:
                self._recorded[shape] = self._allocate(shape, len(self._recorded) + 1)
            return self._recorded[shape]
        if shape not in self._buffers:
            self._buffers[shape] = self._allocate(shape, NOT_RECORDED)
            if len(self._buffers) > MOST_SHAPES:
                self._buffers.popitem(last=False)
        self._buffers.move_to_end(shape)
        return self._buffers[shape]

    def _allocate(self, shape: tuple[int, int], recording: int) -> Buffers:
        return Buffers(self._session, self._device, shape, self.reader.spec.dim, recording)


RECORDED = [
    (queries, tokens) for queries in (1, 2, 4, 8) for tokens in range(LENGTH_STEP, RECORDED_TOKENS + 1, LENGTH_STEP)
]
"""Every shape of small batches."""


def _allocate(shape: tuple[int, int], kind: str, device: str) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, NUMPY_TYPES[kind], device, 0)


def next_shape(queries: int, longest: int, max_length: int) -> tuple[int, int]:
    """The smallest shape of the few that are used which holds so many queries and tokens."""
    step = 1 if queries <= 2 else 4 if queries <= 8 else 8 if queries <= 64 else 32
    return -(-queries // step) * step, min(-(-longest // LENGTH_STEP) * LENGTH_STEP, max_length)
