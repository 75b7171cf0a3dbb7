"""Indexes by FAISS: how each kind is built, written and opened. Knows nothing of queries, documents or filters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from indexer.errors import BadIndex, BadSnapshot, NotWritten
from indexer.store.arrays import Array
from indexer.store.kinds import HNSW_EF_CONSTRUCTION, HNSW_LINKS, LEAST_ROWS_FOR_LISTS, IndexKind, list_count
from models.progress import Progress

# FAISS's own type stubs do not know what its Python wrappers add.
untyped: Any = faiss
FaissIndex = Any

CAGRA_LINKS = 64
# Each list of an inverted file is learned from this many rows.
TRAINING_ROWS_PER_LIST = 64
# Dimensions that one 4-bit code of the product quantiser stands for, where that divides the dimension.
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
    """An exact index that reads `vectors` (rows, dim) float16, C order, where they lie.

    FAISS widens the numbers as it reads them, which on a processor is quicker than reading them at double width.
    """
    if not vectors.flags.c_contiguous:
        raise ValueError("vectors that do not lie row by row cannot be searched in place")
    index = untyped.IndexScalarQuantizer(vectors.shape[1], faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    codes = vectors.reshape(-1).view(np.uint8)
    # The owner of the fresh index's empty codes is nobody: FAISS neither frees nor keeps what the view points to.
    index.codes = untyped.MaybeOwnedVectorUInt8.create_view(faiss.swig_ptr(codes), codes.size, index.codes.owner)
    index.ntotal = len(vectors)
    index.referenced_objects = [codes]
    return index


def build_index(vectors: Array, kind: IndexKind, path: Path) -> dict[str, int]:
    """Writes what `kind` adds to `vectors` (rows, dim) float16; returns the parameters that made it."""
    if kind is IndexKind.FLAT:
        return {}
    if kind is not IndexKind.HNSW and len(vectors) < LEAST_ROWS_FOR_LISTS:
        raise BadIndex(f"{kind} needs {LEAST_ROWS_FOR_LISTS} passages, there are {len(vectors)}; choose flat")
    if kind is IndexKind.CAGRA:
        _write(build_graph(vectors), kind, path)
        return {"links": CAGRA_LINKS}
    if kind is IndexKind.HNSW:
        index = _empty_graph(vectors.shape[1])
        parameters = {"links": HNSW_LINKS, "ef_construction": HNSW_EF_CONSTRUCTION}
    else:
        lists = list_count(len(vectors))
        index = _empty_lists(vectors.shape[1], kind, lists)
        index.train(_training_rows(vectors, lists))
        if kind is IndexKind.RABITQ:
            _nudge_centres(index)
        parameters = {"lists": lists}
    with Progress("index", "passages", len(vectors)) as bar:
        for block in _blocks(vectors):
            index.add(block)
            bar.update(len(block))
    _write(index, kind, path)
    return parameters


def build_graph(vectors: Array) -> Any:  # noqa: ANN401 - FAISS's own stubs do not know it
    """The graph over vectors (rows, dim) float16, built on the card and fetched from it."""
    resources = require_card()
    config = untyped.GpuIndexCagraConfig()
    config.graph_degree = CAGRA_LINKS
    config.intermediate_graph_degree = 2 * CAGRA_LINKS
    index = untyped.GpuIndexCagra(resources, vectors.shape[1], faiss.METRIC_INNER_PRODUCT, config)
    index.train(np.ascontiguousarray(vectors), numeric_type=untyped.Float16)
    graph = untyped.index_gpu_to_cpu(index)
    graph.base_level_only = True  # what the card built has no upper levels to descend by
    return graph


def require_card() -> Any:  # noqa: ANN401 - see above
    """FAISS's resources of the card; raises BadIndex where this FAISS knows none, or there is none."""
    if not has_card():
        raise BadIndex("cagra needs an NVIDIA card and the FAISS of the gpu extra; choose hnsw, or build it there")
    return untyped.StandardGpuResources()


def has_card() -> bool:
    return hasattr(faiss, "GpuIndexCagra") and untyped.get_num_gpus() > 0


def open_index(path: Path, kind: IndexKind, exact: FaissIndex) -> FaissIndex:
    """The index that `build_index` wrote over the vectors of `exact`, by which it scores; `exact` itself if flat."""
    if kind is IndexKind.FLAT:
        return exact
    try:
        # Mapped, not read, where FAISS can: processes that serve one snapshot share its pages.
        index = untyped.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise BadSnapshot(f"{path} is not a readable FAISS index; build the snapshot again") from error
    if not isinstance(index, _CLASSES[kind]) or (index.ntotal, index.d) != (exact.ntotal, exact.d):
        found = f"{type(index).__name__} {index.ntotal} × {index.d}"
        raise BadSnapshot(f"{path} holds {found}, expected {kind} {exact.ntotal} × {exact.d}; build it again")
    if not kind.is_graph:
        return faiss.IndexRefine(index, exact)
    if index.storage is not None:  # format 1, which has the vectors a second time
        return index
    owned = exact.thisown
    index.storage = exact
    exact.thisown = owned  # the assignment took it away, and nobody would ever free it
    index.referenced_objects = [exact]
    return index


def _write(index: FaissIndex, kind: IndexKind, path: Path) -> None:
    try:
        # Of a graph only the links are kept: the vectors are there already.
        untyped.write_index(index, str(path), faiss.IO_FLAG_SKIP_STORAGE if kind.is_graph else 0)
    except RuntimeError as error:
        raise NotWritten(path, "FAISS says: write error") from error


def _empty_graph(dim: int) -> FaissIndex:
    # Links are made from float16 storage, half the memory of float32.
    index = untyped.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_fp16, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = HNSW_EF_CONSTRUCTION
    return index


def _empty_lists(dim: int, kind: IndexKind, lists: int) -> FaissIndex:
    pieces = next(pieces for pieces in range(max(1, dim // PQ_DIMENSIONS_PER_CODE), 0, -1) if dim % pieces == 0)
    codes = f"PQ{pieces}x4fs" if kind is IndexKind.IVF_PQ else "RaBitQ"
    return faiss.index_factory(dim, f"IVF{lists},{codes}", faiss.METRIC_INNER_PRODUCT)


def _nudge_centres(index: FaissIndex) -> None:
    """Moves the lists' centres off the vectors: of one that equals its centre, as repeated texts do, RaBitQ keeps a
    direction of length zero and then mistakes its score."""
    quantizer = faiss.downcast_index(index.quantizer)
    centres = quantizer.reconstruct_n(0, quantizer.ntotal)
    noise = np.random.default_rng(0).standard_normal(centres.shape, dtype=np.float32)
    quantizer.reset()
    quantizer.add(centres + CENTRE_NUDGE * noise)


def _training_rows(vectors: Array, lists: int) -> NDArray[np.float32]:
    """Rows at equal distances, so that the same vectors always give the same index."""
    count = min(len(vectors), TRAINING_ROWS_PER_LIST * lists)
    return vectors[np.linspace(0, len(vectors) - 1, count, dtype=np.int64)].astype(np.float32)


def _blocks(vectors: Array) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(vectors), ADD_ROWS):
        yield vectors[start : start + ADD_ROWS].astype(np.float32)
