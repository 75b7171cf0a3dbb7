"""What an engine computes with on a graphics card: ONNX Runtime's CUDA provider, FAISS's search by cuVS.

Vectors are searched exactly, in fp16, unless the snapshot has a graph that was made for the card.

FAISS's objects on the card are for one thread at a time; the engine process has one. Needs the gpu extra. What is not
the card's own runs on any machine, and is tested there.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from indexer.store.kinds import IndexKind
from indexer.store.vectors import CardGraph, VectorIndex
from models.reader import TextReader
from models.spec import verify_file
from service.engine.bound import RECORDED, BoundEncoder
from service.engine.device import CpuVectors, Rows, Vectors, VectorSearch
from service.errors import BadDevice
from service.serving import Selection

PROVIDER = "CUDAExecutionProvider"
NEEDS = "CARE_DEVICE=cuda needs an NVIDIA card and the gpu extra"
# FAISS selects no more than this on a card.
MOST_K = 2048
ADD_ROWS = 65_536
MEMORISED_FILTERS = 32
# Larger batches than those that are recorded at the start, each of them once more to be replayed.
WARM_UP = ((16, 16), (64, 32))


class Cuda:
    """The first graphics card of this machine."""

    def load_encoder(self, folder: Path) -> BoundEncoder:
        reader = TextReader.open(folder, device="cuda")
        graph = verify_file(folder, reader.variant.filename, reader.spec)
        encoder = BoundEncoder(reader, open_session(graph), "cuda")
        for queries, tokens in (*RECORDED, *RECORDED, *WARM_UP):
            if tokens <= reader.spec.max_length:
                encoder.encode(np.ones(queries * tokens, np.int32), np.full(queries, tokens, np.int32))
        return encoder

    def open_vectors(self, vectors: VectorIndex) -> VectorSearch:
        if vectors.kind is IndexKind.CAGRA:
            return GraphVectors(CardGraph(vectors))
        return FlatVectors(build_flat(vectors.values), CpuVectors(vectors, 0))


class GraphVectors:
    """A walk over the snapshot's graph on the card."""

    def __init__(self, graph: CardGraph) -> None:
        self._graph = graph

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        return self._graph.search(queries, k, None if selection is None else selection.mask)


class FlatVectors:
    """Exact search in an index of FAISS; what it cannot do is done by the snapshot's own index."""

    def __init__(self, index: Any, fallback: VectorSearch) -> None:  # noqa: ANN401 - faiss-cpu has no such type
        self._index = index
        self._fallback = fallback
        # The serving gives equal filters one selection; each is kept here with its selector.
        self._parameters: OrderedDict[Selection, Any] = OrderedDict()

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        if k > MOST_K:
            return self._fallback.search(queries, k, selection)
        parameters = None if selection is None else self._parameters_of(selection)
        scores, rows = self._index.search(np.ascontiguousarray(queries, np.float32), k, params=parameters)
        scores[rows < 0] = -np.inf
        return scores, rows

    def _parameters_of(self, selection: Selection) -> object:
        known = self._parameters.get(selection)
        if known is None:
            selector = faiss.IDSelectorBitmap(np.packbits(selection.mask, bitorder="little"))  # type: ignore[call-arg, arg-type]
            known = self._parameters[selection] = faiss.SearchParameters(sel=selector)  # type: ignore[call-arg]
            if len(self._parameters) > MEMORISED_FILTERS:
                self._parameters.popitem(last=False)
        self._parameters.move_to_end(selection)
        return known


def open_session(graph: Path) -> ort.InferenceSession:
    """The graph on the card, refused where ONNX Runtime would quietly compute it elsewhere."""
    if PROVIDER not in ort.get_available_providers():
        raise BadDevice(f"{NEEDS}: this ONNX Runtime has no CUDA")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(graph), options, providers=[(PROVIDER, {"enable_cuda_graph": "1"})])
    except Exception:  # of a graph with a step that is the processor's nothing can be recorded; the reason has no type
        session = ort.InferenceSession(str(graph), options, providers=[PROVIDER])
    if PROVIDER not in session.get_providers():
        raise BadDevice(f"{NEEDS}: ONNX Runtime cannot use the card; its libraries may be missing")
    return session


def build_flat(vectors: NDArray[np.float16]) -> Any:  # noqa: ANN401 - faiss-cpu has no such type
    """An exact index over vectors (rows, dim) in fp16 on the card."""
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
