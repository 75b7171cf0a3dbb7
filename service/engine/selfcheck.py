"""Compares a device with the CPU and times it: `python -m service.engine.selfcheck --device cuda`

Random queries go through the encoder and the index, with and without a filter. On a GPU a graph is built and searched
too. The exit code is 1 if the results differ from ONNX Runtime on the CPU or from numpy.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from timeit import repeat

import faiss
import numpy as np
from numpy.typing import NDArray

from indexer.store.faiss_index import build_index
from indexer.store.kinds import INDEX_FILE, IndexKind
from indexer.store.vectors import VectorIndex
from models.encoder.onnx import OnnxEncoder
from models.encoder.tokenizer import FlatIds, TextReader, best_variant
from models.errors import CareError
from service.engine.device import Cpu, CpuEncoder, CpuVectors, Device, Encoder, VectorSearch
from service.engine.jobs import Vectors
from service.serving.serving import Selection
from service.settings import Settings

BATCHES = (1, 8, 64, 256)
TOKENS = (8, 32)
K = 10
LEAST_COSINE = 0.99
LEAST_OVERLAP = 0.98  # with exact search: neighbours closer than fp16 can tell may change places
REPEATS = 10
# Graph search, over vectors in clusters.
GRAPH_DEPTH = 256
LEAST_GRAPH_OVERLAP = 0.9
LEAST_CPU_GRAPH_OVERLAP = 0.8  # on a CPU it starts at random nodes and may miss a cluster
CLUSTER_ROWS = 1000
SPREAD = np.float32(0.05)


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what to check (%(default)s)")
    parser.add_argument("--encoder", type=Path, default=Settings().encoder, help="encoder folder (%(default)s)")
    parser.add_argument("--rows", type=int, default=100_000, help="random vectors to search (%(default)s)")
    arguments = parser.parse_args()
    try:
        device: Device = Cpu(encoder_threads=0, threads=0)
        if arguments.device == "cuda":
            from service.engine.cuda import Cuda  # needs the gpu extra

            device = Cuda()
        encoder = device.load_encoder(arguments.encoder)
        index = random_index(arguments.rows, encoder.reader.spec.dim)
        right = check_encoder(encoder, arguments.encoder, arguments.device)
        right &= check_search(device.open_vectors(index), index.values)
        if arguments.device == "cuda":
            right &= check_graph(device, arguments.rows, encoder.reader.spec.dim)
    except CareError as error:
        print(f"selfcheck: {error}", file=sys.stderr)
        return 1
    print("the device computes what the CPU computes" if right else "THE DEVICE DIFFERS FROM THE CPU")
    return 0 if right else 1


def check_encoder(encoder: Encoder, folder: Path, device: str, batches: Sequence[int] = BATCHES) -> bool:
    """Compares and times random queries; the CPU runs the same graph as the device."""
    reference = CpuEncoder(OnnxEncoder.load(folder, best_variant(folder, device)))
    right = True
    for batch in batches:
        ids, lengths = random_tokens(batch, encoder.reader)
        cosine = float((encoder.encode(ids, lengths) * reference.encode(ids, lengths)).sum(axis=1).min())
        milliseconds = _timed(partial(encoder.encode, ids, lengths))
        print(f"encode {batch:4} queries: {milliseconds:8.3f} ms, least cosine {cosine:.5f}")
        right &= cosine >= LEAST_COSINE
    return right


def check_search(
    vectors: VectorSearch, values: NDArray[np.float16], near: Vectors | None = None, least: float = LEAST_OVERLAP
) -> bool:
    """Compares and times queries over all rows and over half of them; they lie around the points `near`, if given."""
    randomly = np.random.default_rng(1)
    half = randomly.random(len(values)) < 0.5
    right = True
    for batch in BATCHES:
        noise = randomly.standard_normal((batch, values.shape[1]), np.float32)
        queries = _unit(noise if near is None else near[randomly.integers(len(near), size=batch)] + SPREAD * noise)
        for selection in (None, Selection((), lambda: half)):
            scores, rows = vectors.search(queries, K, selection)
            overlap = _overlap(queries, values, None if selection is None else half, rows)
            milliseconds = _timed(partial(vectors.search, queries, K, selection))
            which = "all rows" if selection is None else "filtered"
            print(f"search {batch:4} queries, {which}: {milliseconds:8.3f} ms, overlap {overlap:.4f}")
            right &= overlap >= least and bool((np.diff(scores, axis=1) <= 0).all())
    return right


def check_graph(device: Device, rows: int, dim: int) -> bool:
    """Builds a graph on the GPU over vectors in clusters, like embeddings, and searches it there and on the CPU."""
    randomly = np.random.default_rng(2)
    centres = _unit(randomly.standard_normal((max(1, rows // CLUSTER_ROWS), dim), np.float32))
    spread = SPREAD * randomly.standard_normal((rows, dim), np.float32)
    values = _unit(centres[randomly.integers(len(centres), size=rows)] + spread).astype(np.float16)
    with TemporaryDirectory(prefix="care-selfcheck-") as folder:
        began = perf_counter()
        build_index(values, IndexKind.CAGRA, Path(folder, INDEX_FILE))
        print(f"graph over {rows} rows: {perf_counter() - began:.1f} s")
        own = VectorIndex.open(Path(folder), IndexKind.CAGRA, values, GRAPH_DEPTH)
        print("searched on the CPU:")
        right = check_search(CpuVectors(own, 0), values, centres, LEAST_CPU_GRAPH_OVERLAP)
        print("searched on the GPU:")
        return right & check_search(device.open_vectors(own), values, centres, LEAST_GRAPH_OVERLAP)


def random_index(rows: int, dim: int) -> VectorIndex:
    """Makes unit vectors in fp16 with an exact CPU index."""
    values = _unit(np.random.default_rng(0).standard_normal((rows, dim), np.float32)).astype(np.float16)
    index = faiss.IndexFlatIP(dim)
    index.add(values.astype(np.float32))
    return VectorIndex(IndexKind.FLAT, values, index)


def random_tokens(queries: int, reader: TextReader) -> tuple[FlatIds, FlatIds]:
    """Makes queries of 8 to 32 random tokens."""
    randomly = np.random.default_rng(queries)
    lengths = randomly.integers(TOKENS[0], TOKENS[1] + 1, queries).astype(np.int32)
    ids = randomly.integers(0, reader.tokenizer.vocabulary_size, int(lengths.sum())).astype(np.int32)
    return ids, lengths


def _overlap(
    queries: Vectors, values: NDArray[np.float16], allowed: NDArray[np.bool_] | None, rows: NDArray[np.int64]
) -> float:
    """Returns the share of the true best K rows among those found."""
    scores = queries @ values.astype(np.float32).T
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    best = np.argpartition(-scores, K, axis=1)[:, :K]
    return float(np.mean([len(np.intersect1d(own, true)) / K for own, true in zip(rows, best, strict=True)]))


def _unit(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)  # type: ignore[no-any-return]


def _timed(call: Callable[[], object]) -> float:
    """Returns the median time of some calls, in milliseconds."""
    return float(np.median(repeat(call, number=1, repeat=REPEATS)) * 1000)


if __name__ == "__main__":
    sys.exit(main())
