"""Who goes next: two lanes of work that waits. A plain data structure: no threads, no sockets, no clock of its own.

Online work goes before bulk work, and a batch that holds bulk work stays short, so that a single query waits for one
slice of a thousand at most; now and then bulk goes first, so that it ends. Knows nothing of what the work is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Generic, Protocol, TypeVar

# A batch that holds bulk work takes about so long, and holds so many queries at least, unless they are longer than a
# question: four documents would take a processor a fifth of a second.
SLICE_SECONDS = 0.010
LEAST_SLICE = 4
LEAST_SLICE_TOKENS = 128
# So many batches may pass the bulk lane over in a row.
MOST_PASSES = 4


class Work(Protocol):
    """One query, or several that stay together."""

    @property
    def size(self) -> int:
        """Queries."""
        ...

    @property
    def length(self) -> int:
        """Tokens of the longest query."""
        ...

    @property
    def serving(self) -> object:
        """What it is to be answered from: work of two servings never shares a batch."""
        ...

    def is_wanted(self, now: float) -> bool:
        """Whether somebody still waits for it."""
        ...


W = TypeVar("W", bound=Work)


class Lanes(Generic[W]):
    """The two lanes, and the batches that are taken from them: at most so many queries and padded tokens each."""

    def __init__(self, batch_queries: int, batch_tokens: int) -> None:
        self._batch_queries = batch_queries
        self._batch_tokens = batch_tokens
        self._online: deque[W] = deque()
        self._bulk: deque[W] = deque()
        self._passes = 0
        self.online_queries = 0
        self.bulk_queries = 0

    def __len__(self) -> int:
        """Queries that wait."""
        return self.online_queries + self.bulk_queries

    def add(self, works: Iterable[W], *, bulk: bool = False, first: bool = False) -> None:
        for work in works:
            if bulk:
                self._bulk.append(work)
                self.bulk_queries += work.size
            else:
                (self._online.appendleft if first else self._online.append)(work)
                self.online_queries += work.size

    def take(self, now: float, slice_queries: int, *, bulk: bool = True) -> tuple[list[W], list[W]]:
        """The next batch, and what was dropped on the way because nobody waits for it; `bulk` may be kept out.

        Work that is larger than the limits goes alone rather than never.
        """
        batch: list[W] = []
        dropped: list[W] = []
        waits = bulk and bool(self._bulk)
        if self._passes < MOST_PASSES or not waits:
            self.online_queries -= self._move(self._online, batch, dropped, self._batch_queries, now)
        if waits:
            online = len(batch)
            most = min(max(slice_queries, self._least_slice()), self._batch_queries)
            self.bulk_queries -= self._move(self._bulk, batch, dropped, most, now)
            self._passes = self._passes + 1 if self._bulk and len(batch) == online else 0
        return batch, dropped

    def drop(self, is_useless: Callable[[W], bool], *, bulk: bool = True) -> list[W]:
        """Takes out what is not to be computed; `bulk` may be spared."""
        online = _take_out(self._online, is_useless)
        others = _take_out(self._bulk, is_useless) if bulk else []
        self.online_queries -= sum(work.size for work in online)
        self.bulk_queries -= sum(work.size for work in others)
        return online + others

    def clear(self) -> None:
        self._online.clear()
        self._bulk.clear()
        self.online_queries = self.bulk_queries = 0

    def _least_slice(self) -> int:
        """How many queries of the bulk lane are taken at least."""
        tokens, queries = 0, 0
        for work in islice(self._bulk, LEAST_SLICE):
            tokens += work.size * work.length
            if tokens > LEAST_SLICE_TOKENS:
                break
            queries += work.size
        return queries

    def _move(self, lane: deque[W], batch: list[W], dropped: list[W], most: int, now: float) -> int:
        """Moves work from the head of a lane to the batch, up to the limits; returns the queries that left the lane."""
        size = sum(work.size for work in batch)
        longest = max((work.length for work in batch), default=0)
        left = 0
        while lane:
            work = lane[0]
            if work.is_wanted(now):
                longest = max(longest, work.length)
                size += work.size
                too_large = size > most or size * longest > self._batch_tokens
                if batch and (too_large or work.serving is not batch[0].serving):
                    break
            (batch if work.is_wanted(now) else dropped).append(lane.popleft())
            left += work.size
        return left


def _take_out(lane: deque[W], is_useless: Callable[[W], bool]) -> list[W]:
    taken = [work for work in lane if is_useless(work)]
    if taken:
        kept = [work for work in lane if not is_useless(work)]
        lane.clear()
        lane.extend(kept)
    return taken
