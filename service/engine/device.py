"""Computes batches: encoders and vector search on the CPU or in a vector database (`cuda` has the GPU).

Queries come as one array of token ids and the length of each, so that any number costs a few array operations.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol
from weakref import ref

import numpy as np

from indexer.errors import DatabaseAway
from indexer.store.arrays import Rows
from indexer.store.collection import Database
from indexer.store.snapshot import Snapshot
from indexer.store.vectors import VectorIndex, limit_threads
from models.encoder.onnx import OnnxEncoder, OnnxReranker, bulk_batches
from models.encoder.spec import EncoderSpec, Variant
from models.encoder.tokenizer import FlatIds, Ids, TextReader, pad_flat
from service.engine.jobs import DATABASE_AWAY, NO_ROWS, NO_VECTORS, BatchTimes, Request, Response, Status, Vectors
from service.limits import Breaker
from service.serving.serving import Selection, Serving

if TYPE_CHECKING:
    from indexer.store.filters import Filter
    from indexer.store.qdrant import Qdrant, QdrantVectors

# Tokens of one call: calls of this size, of queries of similar length, take a quarter less time than a padded batch.
CALL_TOKENS = 128
# A search of fewer products takes one core a few milliseconds. Threads would take longer: they meet at barriers, and on
# a busy machine one that is not running delays the rest for a whole time slice.
PARALLEL_PRODUCTS = 50_000_000
GRAPH_ROWS = 2000  # that a graph search visits, about
RETRY_SECONDS = 1.0


class Encoder(Protocol):
    """Runs an encoder's graph."""

    @property
    def reader(self) -> TextReader: ...

    def encode(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        """Returns unit vectors (queries, dim); `ids` holds the tokens of one query after the other."""
        ...


class VectorSearch(Protocol):
    """Searches one snapshot's vectors by inner product."""

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        """Returns scores and passage rows, both (queries, k), best first; empty places are row −1, score −inf."""
        ...


OpenVectors = Callable[[Snapshot], VectorSearch]


class Device(Protocol):
    """Opens encoders, rerankers and vectors for computing."""

    def load_encoder(self, folder: Path) -> Encoder: ...

    def load_reranker(self, folder: Path) -> GraphReranker: ...

    def open_vectors(self, vectors: VectorIndex) -> VectorSearch: ...


class CpuEncoder:
    """Runs an encoder's graph on the CPU."""

    def __init__(self, encoder: OnnxEncoder) -> None:
        self.reader = encoder

    def encode(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        vectors = np.empty((len(lengths), self.reader.spec.dim), np.float32)
        for rows, padded, mask in _calls(ids, lengths, CALL_TOKENS):
            vectors[rows] = self.reader.encode_padded(padded, mask)
        return vectors


class GraphReranker:
    """Runs a reranker's graph by ONNX Runtime, in calls of at most `call_tokens` padded tokens.

    int8 takes each pair alone: a score must not depend on the pairs beside it.
    """

    def __init__(self, reranker: OnnxReranker, call_tokens: int = CALL_TOKENS) -> None:
        self.reader = reranker
        self._call_tokens = 1 if reranker.variant is Variant.INT8 else call_tokens

    def score(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        """Returns the scores (pairs,); `ids` holds the tokens of one pair after the other."""
        scores = np.empty(len(lengths), np.float32)
        for rows, padded, mask in _calls(ids, lengths, self._call_tokens):
            scores[rows] = self.reader.score_padded(padded, mask)
        return scores


def _calls(ids: FlatIds, lengths: FlatIds, tokens: int) -> Iterator[tuple[list[int], Ids, Ids]]:
    """Groups texts of similar lengths, at most `tokens` padded tokens each; yields places, ids and mask."""
    starts = np.cumsum(lengths) - lengths
    for rows in bulk_batches(lengths.tolist(), tokens):
        own = np.concatenate([ids[starts[row] : starts[row] + lengths[row]] for row in rows])
        yield rows, *pad_flat(own, lengths[rows])


class ServerEncoder:
    """Placeholder for an encoder behind an address: its queries reach the engine with their vectors."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader

    def encode(self, ids: FlatIds, lengths: FlatIds) -> Vectors:
        raise RuntimeError("a query of an encoder behind an address came without its vector")


def open_encoder(device: Device, folder: Path) -> Encoder:
    """Loads an encoder on the device; for one behind an address only its description."""
    if EncoderSpec.load(folder).address is None:
        return device.load_encoder(folder)
    from models.encoder.address import AddressReader

    return ServerEncoder(AddressReader.open(folder))


class CpuVectors:
    """Searches a snapshot's own index; uses several threads only for large searches."""

    def __init__(self, vectors: VectorIndex, threads: int) -> None:
        self._vectors = vectors
        rows, dim = vectors.values.shape
        self._products = dim * (min(rows, GRAPH_ROWS) if vectors.kind.is_graph else rows)
        self._threads = threads or len(os.sched_getaffinity(0))

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        limit_threads(self._threads if len(queries) * self._products >= PARALLEL_PRODUCTS else 1)
        return self._vectors.search(queries, k, None if selection is None else selection.mask)


class Cpu:
    """The CPU; at most `threads` for one search, 0 means one per core."""

    def __init__(self, encoder_threads: int = 1, threads: int = 0) -> None:
        self._encoder_threads = encoder_threads
        self._threads = threads

    def load_encoder(self, folder: Path) -> CpuEncoder:
        return CpuEncoder(OnnxEncoder.load(folder, threads=self._encoder_threads))

    def load_reranker(self, folder: Path) -> GraphReranker:
        return GraphReranker(OnnxReranker.load(folder, threads=self._encoder_threads))

    def open_vectors(self, vectors: VectorIndex) -> CpuVectors:
        return CpuVectors(vectors, self._threads)


class DatabaseVectors:
    """Searches one snapshot's vectors in a database; opens them at the first search that gets through.

    While the database keeps failing, the breaker saves searches the timeout.
    """

    def __init__(self, database: Qdrant, snapshot: Snapshot, breaker: Breaker) -> None:
        self._database = database
        # Weak: an engine keeps this object for as long as the snapshot lives.
        self._snapshot = ref(snapshot)
        self._breaker = breaker
        self._vectors: QdrantVectors | None = None

    def open(self) -> QdrantVectors:
        """Raises BadCollection if the snapshot is not in the database, and DatabaseAway."""
        if self._vectors is None:
            snapshot = self._snapshot()
            assert snapshot is not None  # the caller holds it
            self._vectors = self._database.open(snapshot)
        return self._vectors

    def search(self, queries: Vectors, k: int, selection: Selection | None) -> tuple[Vectors, Rows]:
        """See VectorSearch; raises what `open` raises."""
        if not self._breaker.allows():
            raise DatabaseAway(DATABASE_AWAY)
        try:
            found = self.open().search(queries, k, () if selection is None else selection.filters)
        except DatabaseAway as error:
            self._breaker.failed(str(error))
            raise
        self._breaker.succeeded()
        return found


def searched_by(device: Device, database: Database | None = None) -> OpenVectors:
    """Returns how to open vectors: in the database if there is one, by one client for all, else on the device."""
    if database is None:
        return lambda snapshot: device.open_vectors(snapshot.vectors)
    connected = database.connect()
    breaker = Breaker(f"searching in {database.url}", RETRY_SECONDS)

    def open_vectors(snapshot: Snapshot) -> DatabaseVectors:
        vectors = DatabaseVectors(connected, snapshot, breaker)
        with suppress(DatabaseAway):  # a later search opens it
            vectors.open()
        return vectors

    return open_vectors


@dataclass(slots=True, eq=False)
class OpenServing:
    """A serving on a device. In the engine process it has a handle; `holders` counts the openings by workers."""

    serving: Serving
    encoder: Encoder
    vectors: VectorSearch
    handle: int = 0
    holders: int = 0
    reranker: GraphReranker | None = None


def compute_batch(held: OpenServing, requests: Sequence[Request], waiting: int = 0) -> list[Response]:
    """Answers each request, in order; raises what the device or a filter raises."""
    began = perf_counter()
    vectors = _embed(held, requests)
    encoded = perf_counter()
    found = _search(held, requests, vectors)
    times = BatchTimes(encoded - began, perf_counter() - encoded)
    size = sum(request.load for request in requests)
    return [
        Response(one.number, Status.DONE, times, size, waiting, rows, scores, own if one.keep_vectors else NO_VECTORS)
        for one, own, (scores, rows) in zip(requests, vectors, found, strict=True)
    ]


def _embed(held: OpenServing, requests: Sequence[Request]) -> list[Vectors]:
    """Returns the embeddings (queries, dim) of each request: its own, or encoded in one call with the others'.

    Those of pairs are their scores (pairs, 1).
    """
    vectors = [request.vectors for request in requests]
    ways: list[tuple[bool, Callable[[FlatIds, FlatIds], Vectors]]]
    ways = [(False, held.encoder.encode), (True, partial(_score, held))]
    for pairs, compute in ways:
        unread = [place for place, one in enumerate(requests) if len(one.lengths) and one.pairs is pairs]
        if not unread:
            continue
        lengths = np.concatenate([requests[place].lengths for place in unread])
        matrix, start = compute(np.concatenate([requests[place].ids for place in unread]), lengths), 0
        for place in unread:
            end = start + len(requests[place].lengths)
            vectors[place] = matrix[start:end]
            start = end
    return vectors


def _score(held: OpenServing, ids: FlatIds, lengths: FlatIds) -> Vectors:
    if held.reranker is None:
        raise ValueError("a pair came to an engine without a reranker")
    return held.reranker.score(ids, lengths)[:, None]


def _search(held: OpenServing, requests: Sequence[Request], vectors: Sequence[Vectors]) -> list[tuple[Vectors, Rows]]:
    """Returns scores and rows of each request; searches those of equal filters in one call, with the largest k."""
    groups: defaultdict[tuple[Filter, ...], list[int]] = defaultdict(list)
    for position, request in enumerate(requests):
        if request.k:
            groups[request.filters].append(position)
    found: list[tuple[Vectors, Rows]] = [(NO_VECTORS, NO_ROWS)] * len(requests)
    for filters, positions in groups.items():
        selection = held.serving.select(filters) if filters else None
        k = max(requests[position].k for position in positions)
        own = [vectors[position] for position in positions]
        scores, rows = held.vectors.search(own[0] if len(own) == 1 else np.concatenate(own), k, selection)
        start = 0
        for position in positions:
            end, depth = start + requests[position].size, requests[position].k
            found[position] = scores[start:end, :depth], rows[start:end, :depth]
            start = end
    return found
