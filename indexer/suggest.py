"""Suggests the kind of index for a collection on a CPU: builds each over a sample of its vectors and measures it.

Time and memory at the full size are extrapolated: exact search grows linearly, a graph with the logarithm, lists with
the square root. The build measures the recall of the real index.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from indexer.checks import K, choose_depth
from indexer.errors import BadBuild
from indexer.store.arrays import Array
from indexer.store.faiss_index import build_index, exact_index, open_index
from indexer.store.kinds import INDEX_FILE, LEAST_ROWS_FOR_LISTS, IndexKind
from indexer.store.vectors import VectorIndex, limit_threads
from models.encoder.onnx import Vectors

SAMPLE_ROWS = 20_000
TIMED_QUERIES = 100


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind over the sample, and its expected cost at the full size. `recall` is None below the floor."""

    kind: IndexKind
    recall: float | None
    depth: int
    sample_ms: float
    expected_ms: float
    expected_bytes: int


def measure_kinds(vectors: Array, queries: Vectors, passages: int, floor: float) -> list[Measured]:
    """Measures every kind that `vectors` (rows, dim) float16 allow, for a collection of `passages`; one thread."""
    count = min(len(vectors), SAMPLE_ROWS)
    sample = vectors[np.linspace(0, len(vectors) - 1, count, dtype=np.int64)]
    # CAGRA is for GPUs, which no measurement on a CPU can judge.
    here = [kind for kind in IndexKind if kind is not IndexKind.CAGRA]
    kinds = [kind for kind in here if not kind.has_lists or count >= LEAST_ROWS_FOR_LISTS]
    limit_threads(1)
    with tempfile.TemporaryDirectory(prefix="care-suggest-") as folder:
        return [_measure(kind, sample, queries, passages, floor, Path(folder, kind)) for kind in kinds]


def propose(measured: list[Measured], memory_bytes: int) -> Measured:
    """The quickest kind that reaches the floor and fits; raises BadBuild if none does."""
    fitting = [one for one in measured if one.recall is not None and one.expected_bytes <= memory_bytes]
    if not fitting:
        least = min(one.expected_bytes for one in measured if one.recall is not None)
        needs = f"no kind fits into {memory_bytes / 1e6:.0f} MB: the smallest needs {least / 1e6:.0f} MB"
        raise BadBuild(f"{needs}; allow more (--memory-mb), or search in a database (CARE_VECTORS)")
    return min(fitting, key=lambda one: one.expected_ms)


def _measure(kind: IndexKind, sample: Array, queries: Vectors, passages: int, floor: float, folder: Path) -> Measured:
    folder.mkdir()
    build_index(sample, kind, folder / INDEX_FILE)
    index = VectorIndex(kind, sample, open_index(folder / INDEX_FILE, kind, exact_index(sample)))
    try:
        depth, recall = choose_depth(index, queries, floor)
        found: float | None = recall.at_10
    except BadBuild:
        depth, found = kind.depths(len(sample))[-1], None
    times = []
    for query in queries[:TIMED_QUERIES]:
        began = perf_counter()
        index.search(query[np.newaxis], K, depth=depth)
        times.append(perf_counter() - began)
    milliseconds = float(np.median(times)) * 1000
    added = (folder / INDEX_FILE).stat().st_size if kind is not IndexKind.FLAT else 0
    # Lists read only a few hundred vectors, which may come from the disk; other kinds read vectors all over.
    per_row = added / len(sample) + (0 if kind.has_lists else sample.itemsize * sample.shape[1])
    if kind.is_graph:
        growth = math.log(max(2, passages)) / math.log(max(2, len(sample)))
    else:
        growth = (passages / len(sample)) ** (1.0 if kind is IndexKind.FLAT else 0.5)
    return Measured(kind, found, depth, milliseconds, milliseconds * growth, int(per_row * passages))
