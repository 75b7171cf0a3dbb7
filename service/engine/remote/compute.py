"""What the engine process computes with: the servings that it holds open, and the responses to a batch of requests."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from indexer.store import Collection
from models.errors import BadEncoder
from service.engine.device import Device, Encoder, VectorSearch, searched_by
from service.engine.jobs import BatchTimes
from service.engine.remote.frames import NO_ROWS, NO_VECTORS, Request, Response, Rows, Status, Vectors, read_filters
from service.serving import Serving, require_query_encoder
from service.settings import Settings

logger = logging.getLogger(__name__)

Name = tuple[str, str]
"""A snapshot's version and an encoder's fingerprint."""
Result = tuple["Name", "OpenServing | Exception"]


@dataclass(slots=True, eq=False)
class OpenServing:
    """A snapshot and an encoder on the device; `holders` counts the workers' openings that were not released."""

    handle: int
    serving: Serving
    encoder: Encoder
    vectors: VectorSearch
    holders: int = 0


class OpenServings:
    """The servings by handle: each is opened once for all workers, and closed when no worker holds it.

    Used by the engine's thread. Another thread opens servings and calls `on_opened` from there.
    """

    def __init__(self, settings: Settings, device: Device, on_opened: Callable[[Result], None]) -> None:
        self._settings = settings
        self._device = device
        self._on_opened = on_opened
        self._opener = ThreadPoolExecutor(1, "care-open")
        self._open_vectors = searched_by(device, settings.database)
        self._encoder = device.load_encoder(require_query_encoder(settings.encoder))
        self._held: dict[int, OpenServing] = {}
        self._handles = 0

    @property
    def newest(self) -> OpenServing | None:
        return self._held[max(self._held)] if self._held else None

    def get(self, handle: int) -> OpenServing | None:
        return self._held.get(handle)

    def find(self, name: Name) -> OpenServing | None:
        for held in self._held.values():
            if (held.serving.version, held.serving.encoder.fingerprint) == name:
                return held
        return None

    def open(self, name: Name) -> None:
        """Begins to open a serving; the result goes to `on_opened`, and from there to `put`."""
        self._opener.submit(self._open, name)

    def put(self, opened: OpenServing) -> None:
        self._encoder = opened.encoder
        self._held[opened.handle] = opened
        self._close_unheld()

    def release(self, handle: int) -> None:
        if (held := self._held.get(handle)) is not None:
            held.holders -= 1
            self._close_unheld()

    def close(self) -> None:
        self._opener.shutdown(wait=False, cancel_futures=True)

    def _close_unheld(self) -> None:
        # The newest stays without holders: if all workers died, the next ones will open it again.
        newest = max(self._held, default=0)
        for handle in [number for number, held in self._held.items() if held.holders <= 0 and number != newest]:
            logger.info("snapshot %s is let go", self._held.pop(handle).serving.version)

    def _open(self, name: Name) -> None:
        try:
            self._on_opened((name, self._load(*name)))
        except Exception as error:
            self._on_opened((name, error))

    def _load(self, version: str, fingerprint: str) -> OpenServing:
        settings, encoder = self._settings, self._encoder
        if encoder.reader.fingerprint != fingerprint:
            encoder = self._device.load_encoder(require_query_encoder(settings.encoder))
        if encoder.reader.fingerprint != fingerprint:
            raise BadEncoder(f"{settings.encoder} changed while it was opened; reload once more")
        folder = Collection(settings.collection).folder(version)
        serving = Serving.open(folder, encoder.reader, verify=settings.verify)
        vectors = self._open_vectors(serving.snapshot)
        self._handles += 1
        return OpenServing(self._handles, serving, encoder, vectors)


def compute_batch(held: OpenServing, requests: Sequence[Request], waiting: int = 0) -> list[Response]:
    """Answers each request, in order, in a few array operations; raises what the device or a filter raises."""
    began = perf_counter()
    vectors = _embed(held, requests)
    encoded = perf_counter()
    found = _search(held, requests, vectors)
    times = BatchTimes(encoded - began, perf_counter() - encoded)
    size = sum(request.size for request in requests)
    return [
        Response(
            request.number, Status.DONE, times, size, waiting, rows, scores, own if request.keep_vectors else NO_VECTORS
        )
        for request, own, (scores, rows) in zip(requests, vectors, found, strict=True)
    ]


def _embed(held: OpenServing, requests: Sequence[Request]) -> list[Vectors]:
    """Returns the embeddings (queries, dim) of each request: its own, or encoded in one call with the others'."""
    unread = [request for request in requests if len(request.lengths)]
    if not unread:
        return [request.vectors for request in requests]
    lengths = np.concatenate([request.lengths for request in unread])
    matrix = held.encoder.encode(np.concatenate([request.ids for request in unread]), lengths)
    vectors, start = [], 0
    for request in requests:
        end = start + len(request.lengths)
        vectors.append(matrix[start:end] if end > start else request.vectors)
        start = end
    return vectors


def _search(held: OpenServing, requests: Sequence[Request], vectors: Sequence[Vectors]) -> list[tuple[Vectors, Rows]]:
    """Returns scores and rows of each request; searches those of equal filters in one call, with the largest k."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for position, request in enumerate(requests):
        if request.k:
            groups[request.filters].append(position)
    found: list[tuple[Vectors, Rows]] = [(NO_VECTORS, NO_ROWS)] * len(requests)
    for filters, positions in groups.items():
        selection = held.serving.select(read_filters(filters)) if filters else None
        k = max(requests[position].k for position in positions)
        scores, rows = held.vectors.search(np.concatenate([vectors[position] for position in positions]), k, selection)
        start = 0
        for position in positions:
            own, depth = slice(start, start + requests[position].size), requests[position].k
            found[position] = scores[own, :depth], rows[own, :depth]
            start = own.stop
    return found
