"""A batch of asks to their answers: a handful of array operations however many queries there are.

Knows nothing of sockets, of who asked, or of documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from service.engine.frames import NO_ROWS, NO_VECTORS, Answer, Ask, Rows, Status, Vectors, read_filters
from service.engine.protocol import BatchTimes
from service.engine.shelf import Held


def answer_all(held: Held, asks: Sequence[Ask], waiting: int = 0) -> list[Answer]:
    """The answer to each ask, in order, while so many queries wait; raises what the device or a filter raises."""
    began = perf_counter()
    vectors = _embed(held, asks)
    encoded = perf_counter()
    found = _search(held, asks, vectors)
    times = BatchTimes(encoded - began, perf_counter() - encoded)
    size = sum(ask.size for ask in asks)
    return [
        Answer(ask.number, Status.DONE, times, size, waiting, rows, scores, own if ask.keep_vectors else NO_VECTORS)
        for ask, own, (scores, rows) in zip(asks, vectors, found, strict=True)
    ]


def _embed(held: Held, asks: Sequence[Ask]) -> list[Vectors]:
    """The embeddings (queries, dim) of each ask: its own, or encoded in one call with all the others'."""
    unread = [ask for ask in asks if len(ask.lengths)]
    if not unread:
        return [ask.vectors for ask in asks]
    lengths = np.concatenate([ask.lengths for ask in unread])
    matrix = held.encoder.encode(np.concatenate([ask.ids for ask in unread]), lengths)
    vectors, start = [], 0
    for ask in asks:
        if not len(ask.lengths):
            vectors.append(ask.vectors)
            continue
        vectors.append(matrix[start : start + ask.size])
        start += ask.size
    return vectors


def _search(held: Held, asks: Sequence[Ask], vectors: Sequence[Vectors]) -> list[tuple[Vectors, Rows]]:
    """Scores and rows of each ask; asks of equal filters are searched in one call, as deep as the deepest wants."""
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for position, ask in enumerate(asks):
        if ask.k:
            groups[ask.filters].append(position)
    found: list[tuple[Vectors, Rows]] = [(NO_VECTORS, NO_ROWS)] * len(asks)
    for filters, positions in groups.items():
        selection = held.serving.select(read_filters(filters)) if filters else None
        k = max(asks[position].k for position in positions)
        scores, rows = held.vectors.search(np.concatenate([vectors[position] for position in positions]), k, selection)
        start = 0
        for position in positions:
            own = slice(start, start + asks[position].size)
            found[position] = scores[own, : asks[position].k], rows[own, : asks[position].k]
            start = own.stop
    return found
