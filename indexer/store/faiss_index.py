"""Builds, writes and opens FAISS indexes of each kind; a CAGRA graph is built on a GPU through cuVS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np

from indexer.errors import BadIndex, BadSnapshot, NotWritten
from indexer.store.arrays import Array
from indexer.store.kinds import HNSW_EF_CONSTRUCTION, HNSW_LINKS, LEAST_ROWS_FOR_LISTS, IndexKind, list_count
from models.progress import Progress

# FAISS's own type stubs lack what its Python wrappers add.
untyped: Any = faiss
FaissIndex = Any

CAGRA_LINKS = 64
TRAINING_ROWS_PER_LIST = 64
# Dimensions of one 4-bit code of the product quantiser, if that divides the dimension.
PQ_DIMENSIONS_PER_CODE = 4
CENTRE_NUDGE = np.float32(1e-3)
ADD_ROWS = 16_384

_CLASSES: dict[IndexKind, Any] = {
    IndexKind.HNSW: (faiss.IndexHNSWSQ, faiss.IndexHNSWFlat),  # the latter in format 1
    IndexKind.CAGRA: untyped.IndexHNSWCagra,
    IndexKind.IVF_PQ: faiss.IndexIVFPQFastScan,
    IndexKind.RABITQ: faiss.IndexIVFRaBitQ,
}


def exact_index(vectors: Array) -> FaissIndex:
    """Makes an exact index that reads `vectors` (rows, dim) float16 in place; on a CPU faster than float32."""
    if not vectors.flags.c_contiguous:
        raise ValueError("vectors that do not lie row by row cannot be searched in place")
    index = untyped.IndexScalarQuantizer(vectors.shape[1], faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    codes = vectors.reshape(-1).view(np.uint8)
    # The empty codes of a new index have no owner: FAISS neither frees nor keeps what the view points to.
    index.codes = untyped.MaybeOwnedVectorUInt8.create_view(faiss.swig_ptr(codes), codes.size, index.codes.owner)
    index.ntotal = len(vectors)
    index.referenced_objects = [codes]
    return index


def build_index(vectors: Array, kind: IndexKind, path: Path) -> dict[str, int]:
    """Writes what `kind` adds to `vectors` (rows, dim) float16; returns the build parameters."""
    if kind is IndexKind.FLAT:
        return {}
    rows, dim = vectors.shape
    if kind is not IndexKind.HNSW and rows < LEAST_ROWS_FOR_LISTS:
        raise BadIndex(f"{kind} needs {LEAST_ROWS_FOR_LISTS} passages, there are {rows}; choose flat")
    if kind is IndexKind.CAGRA:
        _write(_build_cagra(vectors), kind, path)
        return {"links": CAGRA_LINKS}
    if kind is IndexKind.HNSW:
        # Links are made from float16 storage, half the memory of float32.
        index = untyped.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_fp16, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
        parameters = {"links": HNSW_LINKS, "ef_construction": HNSW_EF_CONSTRUCTION}
    else:
        index = _train_lists(vectors, kind, list_count(rows))
        parameters = {"lists": list_count(rows)}
    with Progress("index", "passages", rows) as bar:
        for start in range(0, rows, ADD_ROWS):
            block = vectors[start : start + ADD_ROWS].astype(np.float32)
            index.add(block)
            bar.update(len(block))
    _write(index, kind, path)
    return parameters


def require_gpu() -> Any:  # noqa: ANN401 - FAISS's own stubs lack it
    """FAISS's resources of the GPU; raises BadIndex if this FAISS supports none, or there is none."""
    if not has_gpu():
        raise BadIndex("cagra needs an NVIDIA GPU and the FAISS of the gpu extra; choose hnsw, or build it there")
    return untyped.StandardGpuResources()


def has_gpu() -> bool:
    return hasattr(faiss, "GpuIndexCagra") and untyped.get_num_gpus() > 0


def open_index(path: Path, kind: IndexKind, exact: FaissIndex) -> FaissIndex:
    """Opens what `build_index` wrote, which scores by the vectors of `exact`; returns `exact` itself if flat."""
    if kind is IndexKind.FLAT:
        return exact
    try:
        # Mapped, not read, if FAISS can: processes that serve one snapshot share its pages.
        index = untyped.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise BadSnapshot(f"{path} is not a readable FAISS index; build the snapshot again") from error
    if not isinstance(index, _CLASSES[kind]) or (index.ntotal, index.d) != (exact.ntotal, exact.d):
        found = f"{type(index).__name__} {index.ntotal} × {index.d}"
        raise BadSnapshot(f"{path} holds {found}, expected {kind} {exact.ntotal} × {exact.d}; build it again")
    if not kind.is_graph:
        return faiss.IndexRefine(index, exact)
    if index.storage is not None:  # format 1 has the vectors a second time
        return index
    owned = exact.thisown
    index.storage = exact
    exact.thisown = owned  # the assignment cleared it: `exact` would never be freed
    index.referenced_objects = [exact]
    return index


def _write(index: FaissIndex, kind: IndexKind, path: Path) -> None:
    try:
        # Of a graph only the links are kept: vectors.npy has the vectors.
        untyped.write_index(index, str(path), faiss.IO_FLAG_SKIP_STORAGE if kind.is_graph else 0)
    except RuntimeError as error:
        raise NotWritten(path, "FAISS says: write error") from error


def _build_cagra(vectors: Array) -> FaissIndex:
    """Builds a graph over vectors (rows, dim) float16 on the GPU and copies it to the CPU."""
    resources = require_gpu()
    config = untyped.GpuIndexCagraConfig()
    config.graph_degree = CAGRA_LINKS
    config.intermediate_graph_degree = 2 * CAGRA_LINKS
    index = untyped.GpuIndexCagra(resources, vectors.shape[1], faiss.METRIC_INNER_PRODUCT, config)
    index.train(np.ascontiguousarray(vectors), numeric_type=untyped.Float16)
    graph = untyped.index_gpu_to_cpu(index)
    graph.base_level_only = True  # the GPU builds no upper levels
    return graph


def _train_lists(vectors: Array, kind: IndexKind, lists: int) -> FaissIndex:
    """Trains an inverted file on rows at equal distances: the same vectors always give the same index."""
    rows, dim = vectors.shape
    pieces = next(pieces for pieces in range(max(1, dim // PQ_DIMENSIONS_PER_CODE), 0, -1) if dim % pieces == 0)
    codes = f"PQ{pieces}x4fs" if kind is IndexKind.IVF_PQ else "RaBitQ"
    index: FaissIndex = faiss.index_factory(dim, f"IVF{lists},{codes}", faiss.METRIC_INNER_PRODUCT)
    sample = np.linspace(0, rows - 1, min(rows, TRAINING_ROWS_PER_LIST * lists), dtype=np.int64)
    index.train(vectors[sample].astype(np.float32))
    if kind is IndexKind.RABITQ:
        # RaBitQ misjudges a vector that equals its list's centre, as repeated texts do: move the centres off.
        quantizer = faiss.downcast_index(index.quantizer)
        centres = quantizer.reconstruct_n(0, quantizer.ntotal)
        noise = np.random.default_rng(0).standard_normal(centres.shape, dtype=np.float32)
        quantizer.reset()
        quantizer.add(centres + CENTRE_NUDGE * noise)
    return index
