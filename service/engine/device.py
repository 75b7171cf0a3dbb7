"""What an engine computes with: tokens to embeddings to passage rows. Here on the processor; `cuda` is the twin.

Queries come as one run of token ids and the length of each, so that any number of them costs a few array operations.
Knows nothing of queues, sockets or documents.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from indexer.store.snapshot import Snapshot
from indexer.store.vectors import VectorIndex, limit_threads
from models.onnx_encoder import OnnxEncoder, bulk_batches
from models.reader import TextReader
from models.tokenizer import FlatIds, pad_flat
from service.serving import Selection

# A processor pays for every token, padding included, and hardly for a call: calls of so many tokens, of queries of like
# length, take a quarter less time than one padded batch.
CALL_TOKENS = 128
# A search of fewer products than this takes a core a few milliseconds. Sharing it would take longer: the threads meet
# at barriers, and on a busy machine one that is not running holds up the rest for a whole time slice.
PARALLEL_PRODUCTS = 50_000_000
# About how many rows a walk over the graph looks at.
GRAPH_ROWS = 2000

Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]


class Encoder(Protocol):
    """Runs an encoder's graph."""

    @property
    def reader(self) -> TextReader: ...

    def encode(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        """Unit vectors (queries, dim); `ids` holds the queries' tokens one after the other."""
        ...


class VectorSearch(Protocol):
    """Searches one snapshot's vectors by inner product."""

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        """Scores and passage rows, both (queries, k), best first; row −1 with score −inf where there are fewer."""
        ...


OpenVectors = Callable[[Snapshot], VectorSearch]
"""How the vectors of a snapshot come to be searched: by a device, or in a vector database."""


class Device(Protocol):
    """Opens encoders and vectors for computing."""

    def load_encoder(self, folder: Path) -> Encoder: ...

    def open_vectors(self, vectors: VectorIndex) -> VectorSearch: ...


class CpuEncoder:
    """An encoder's graph on the processor."""

    def __init__(self, encoder: OnnxEncoder) -> None:
        self.reader = encoder
        self._encoder = encoder

    def encode(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        starts = np.cumsum(lengths) - lengths
        vectors = np.empty((len(lengths), self.reader.spec.dim), np.float32)
        for rows in bulk_batches(lengths.tolist(), CALL_TOKENS):
            own = np.concatenate([ids[starts[row] : starts[row] + lengths[row]] for row in rows])
            vectors[rows] = self._encoder.encode_padded(*pad_flat(own, lengths[rows]))
        return vectors


class CpuVectors:
    """A snapshot's own index, searched by as many threads as the search is worth."""

    def __init__(self, vectors: VectorIndex, threads: int) -> None:
        self._vectors = vectors
        rows, dim = vectors.values.shape
        self._products = dim * (min(rows, GRAPH_ROWS) if vectors.kind.is_graph else rows)
        self._threads = threads or len(os.sched_getaffinity(0))

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        limit_threads(self._threads if len(queries) * self._products >= PARALLEL_PRODUCTS else 1)
        return self._vectors.search(queries, k, None if selection is None else selection.mask)


class Cpu:
    """The processor of this machine; `threads` of one search at most, 0 means one per core."""

    def __init__(self, encoder_threads: int = 1, threads: int = 0) -> None:
        self._encoder_threads = encoder_threads
        self._threads = threads

    def load_encoder(self, folder: Path) -> CpuEncoder:
        return CpuEncoder(OnnxEncoder.load(folder, threads=self._encoder_threads))

    def open_vectors(self, vectors: VectorIndex) -> CpuVectors:
        return CpuVectors(vectors, self._threads)
