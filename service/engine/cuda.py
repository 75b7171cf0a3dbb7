"""Runs encoders and vector search on a GPU: ONNX Runtime's CUDA provider, and FAISS with cuVS. Needs the gpu extra.

Vectors are searched exactly, in fp16, unless the snapshot has a graph built for the GPU. FAISS's GPU objects are for
one thread at a time; the engine process has one. BoundEncoder and FlatVectors run on any device, and are tested there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from indexer.store.arrays import Rows
from indexer.store.kinds import IndexKind
from indexer.store.vectors import GpuGraph, VectorIndex, marked, selector_of
from models.encoder.onnx import OnnxReranker
from models.encoder.spec import verify_graph
from models.encoder.tokenizer import FlatIds, Ids, TextReader
from service.engine.device import CpuVectors, GraphReranker, VectorSearch
from service.engine.jobs import Vectors
from service.errors import BadDevice
from service.serving.serving import Selection

logger = logging.getLogger(__name__)

PROVIDER = "CUDAExecutionProvider"
NEEDS = "CARE_DEVICE=cuda needs an NVIDIA GPU and the gpu extra"
# FAISS's limit of k on a GPU.
MOST_K = 2048
ADD_ROWS = 65_536
MEMORISED_FILTERS = 32
RERANK_TOKENS = 16_384  # padded tokens of pairs that are scored at once

# Buffers are kept for a bounded number of shapes, so a batch is padded up to the next shape: a GPU computes a few rows
# more in the same time. Lengths are multiples of LENGTH_STEP; numbers of queries grow in steps.
LENGTH_STEP = 8
MOST_SHAPES = 128
# Launching the kernels of few queries takes longer than running them: on a GPU they are recorded once for each shape
# (a CUDA graph) and replayed. Larger batches gain nothing by it.
RECORDED_QUERIES = 8
RECORDED_TOKENS = 64
RECORDED = [
    (queries, tokens) for queries in (1, 2, 4, 8) for tokens in range(LENGTH_STEP, RECORDED_TOKENS + 1, LENGTH_STEP)
]
RECORDING = "gpu_graph_id"
NOT_RECORDED = -1
# Larger batches that are run once at the start.
WARM_UP = ((16, 16), (64, 32))
OUTPUT = "embedding"
MEMORY_SECONDS = 5.0  # between looks at the memory in use
Shape = tuple[int, int]
NUMPY_TYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


class Cuda:
    """The first GPU of this machine."""

    def load_encoder(self, folder: Path) -> BoundEncoder:
        reader = TextReader.open(folder, device="cuda")
        graph = verify_graph(folder, reader.weights, reader.spec)
        encoder = BoundEncoder(reader, open_session(graph), "cuda")
        # Twice: the first run of a shape records, the second replays.
        for queries, tokens in (*RECORDED, *RECORDED, *WARM_UP):
            if tokens <= reader.spec.max_length:
                encoder.encode(np.ones(queries * tokens, np.int32), np.full(queries, tokens, np.int32))
        return encoder

    def load_reranker(self, folder: Path) -> GraphReranker:
        return GraphReranker(OnnxReranker.load(folder, device="cuda"), RERANK_TOKENS)

    def open_vectors(self, vectors: VectorIndex) -> VectorSearch:
        if vectors.kind is IndexKind.CAGRA:
            return GraphVectors(GpuGraph(vectors))
        return FlatVectors(build_flat(vectors.values), CpuVectors(vectors, 0))


def watch_memory(record: Callable[[int, int], None], seconds: float = MEMORY_SECONDS) -> None:
    """Records the used and the whole memory of the GPU in bytes, now and at even intervals, in a thread of its own."""
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:  # a service without this figure is better than none
        logger.warning("the memory of the GPU is not measured: %s", error)
        return

    def watch() -> None:
        while True:
            memory = pynvml.nvmlDeviceGetMemoryInfo(card)
            record(int(memory.used), int(memory.total))
            time.sleep(seconds)

    threading.Thread(target=watch, name="care-card", daemon=True).start()


class Buffers:
    """Ids, mask and embeddings of one shape in device memory, bound to the session."""

    def __init__(self, session: ort.InferenceSession, device: str, dim: int, shape: Shape) -> None:
        def allocate(shape: Shape, kind: str) -> ort.OrtValue:
            return ort.OrtValue.ortvalue_from_shape_and_type(shape, NUMPY_TYPES[kind], device, 0)

        (output,) = session.get_outputs()
        self._inputs = {node.name: allocate(shape, node.type) for node in session.get_inputs()}
        self._types = {node.name: NUMPY_TYPES[node.type] for node in session.get_inputs()}
        self._embeddings = allocate((shape[0], dim), output.type)
        self.binding: Any = session.io_binding()
        for name, buffer in self._inputs.items():
            self.binding.bind_ortvalue_input(name, buffer)
        self.binding.bind_ortvalue_output(OUTPUT, self._embeddings)
        self.options = ort.RunOptions()
        # Numbered by shape: a CUDA graph contains the addresses of its buffers.
        number = shape[0] * (RECORDED_TOKENS + 1) + shape[1] if is_recorded(shape) else NOT_RECORDED
        self.options.add_run_config_entry(RECORDING, str(number))

    def fill(self, ids: Ids, mask: Ids) -> None:
        for name, values in (("input_ids", ids), ("attention_mask", mask)):
            if name in self._inputs:
                self._inputs[name].update_inplace(values.astype(self._types[name], copy=False))

    def read(self, queries: int) -> Vectors:
        # A copy: on memory that the CPU can see, numpy() is a view.
        return np.array(self._embeddings.numpy()[:queries], np.float32)


class BoundEncoder:
    """Runs one session on one device, in one thread, with bound buffers: a batch allocates nothing."""

    def __init__(self, reader: TextReader, session: ort.InferenceSession, device: str) -> None:
        self.reader = reader
        self._session = session
        allocate = partial(Buffers, session, device, reader.spec.dim)
        self._recorded = cache(allocate)
        self._buffers = lru_cache(MOST_SHAPES)(allocate)

    def encode(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        """See Encoder."""
        shape = next_shape(len(lengths), int(lengths.max()), self.reader.spec.max_length)
        present = np.zeros(shape, bool)
        present[: len(lengths)] = np.arange(shape[1]) < lengths[:, None]
        padded = np.zeros(shape, np.int64)
        padded[present] = ids
        # A row without a token would divide zero by zero.
        present[len(lengths) :, 0] = True
        buffers = self._of_shape(shape)
        buffers.fill(padded, present.astype(np.int64))
        self._session.run_with_iobinding(buffers.binding, buffers.options)
        return buffers.read(len(lengths))

    def _of_shape(self, shape: Shape) -> Buffers:
        return (self._recorded if is_recorded(shape) else self._buffers)(shape)


def is_recorded(shape: Shape) -> bool:
    return shape[0] <= RECORDED_QUERIES and shape[1] <= RECORDED_TOKENS


def next_shape(queries: int, longest: int, max_length: int) -> Shape:
    """Returns the smallest shape in use that holds these queries and tokens."""
    step = 1 if queries <= 2 else 4 if queries <= 8 else 8 if queries <= 64 else 32
    return -(-queries // step) * step, min(-(-longest // LENGTH_STEP) * LENGTH_STEP, max_length)


class GraphVectors:
    """Searches the snapshot's graph on the GPU."""

    def __init__(self, graph: GpuGraph) -> None:
        self._graph = graph

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        return self._graph.search(queries, k, None if selection is None else selection.mask)


class FlatVectors:
    """Searches a FAISS index exactly; the fallback does what it cannot."""

    def __init__(self, index: Any, fallback: VectorSearch) -> None:  # noqa: ANN401 - faiss-cpu has no such type
        self._index = index
        self._fallback = fallback
        # By selection: a serving gives equal filters one selection.
        self._parameters = lru_cache(MEMORISED_FILTERS)(_parameters_of)

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        if k > MOST_K:
            return self._fallback.search(queries, k, selection)
        parameters = None if selection is None else self._parameters(selection)
        return marked(*self._index.search(np.ascontiguousarray(queries, np.float32), k, params=parameters))


def _parameters_of(selection: Selection) -> object:
    return faiss.SearchParameters(sel=selector_of(selection.mask))  # type: ignore[call-arg]


def open_session(graph: Path) -> ort.InferenceSession:
    """Opens the graph on the GPU; raises BadDevice if ONNX Runtime would silently use the CPU."""
    if PROVIDER not in ort.get_available_providers():
        raise BadDevice(f"{NEEDS}: this ONNX Runtime has no CUDA")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(graph), options, providers=[(PROVIDER, {"enable_cuda_graph": "1"})])
    except Exception:  # a graph with a node on the CPU cannot be recorded; the error has no type of its own
        session = ort.InferenceSession(str(graph), options, providers=[PROVIDER])
    if PROVIDER not in session.get_providers():
        raise BadDevice(f"{NEEDS}: ONNX Runtime cannot use the GPU; its libraries may be missing")
    return session


def build_flat(vectors: NDArray[np.float16]) -> Any:  # noqa: ANN401 - faiss-cpu has no such type
    """Builds an exact index over vectors (rows, dim) in fp16 on the GPU."""
    if not hasattr(faiss, "StandardGpuResources"):
        raise BadDevice(f"{NEEDS}: this FAISS has no GPU")
    resources = faiss.StandardGpuResources()
    config = faiss.GpuIndexFlatConfig()
    config.device = 0
    config.useFloat16 = True
    config.use_cuvs = True
    index = faiss.GpuIndexFlatIP(resources, vectors.shape[1], config)
    for start in range(0, len(vectors), ADD_ROWS):
        index.add(vectors[start : start + ADD_ROWS].astype(np.float32))
    return index
