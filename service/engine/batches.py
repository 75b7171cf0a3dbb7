"""What a batch costs, and which work it takes: online before bulk, in batches of one serving."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    pass

# A batch that holds bulk work: its target duration, its minimum size, and the tokens up to which that size holds. On a
# CPU four documents would take a fifth of a second.
SLICE_SECONDS = 0.010
LEAST_SLICE = 4
LEAST_SLICE_TOKENS = 128
MOST_PASSES = 4  # batches in a row without bulk work

# Cost model.
NEWEST = 0.1  # weight of the newest batch: about the last twenty count
LEAST_SEEN = 10  # no estimate from fewer queries: the first ones are slow
MOST_LATE = 4.0  # a batch counts at most this many times its estimate: beyond it the machine stalled
DOUBT = 0.25  # batch sizes that vary by this share of their mean weigh as much as the mean in the slope
MOST_QUERIES = 1_000_000  # upper bound of a batch


class CostModel:
    """Estimates batch times: seconds = fixed + per_query · queries, fitted to a moving average.

    With batches of one size all time counts as per query: the conservative estimate.
    """

    def __init__(self) -> None:
        self.fixed = self.per_query = 0.0
        self._batches = self._seen = 0
        self._size = self._seconds = self._variance = self._covariance = 0.0

    def observe(self, queries: int, seconds: float) -> None:
        if self._seen >= LEAST_SEEN:
            seconds = min(seconds, MOST_LATE * (self.fixed + queries * self.per_query))
        self._seen += queries
        self._batches += 1
        newest = max(NEWEST, 1 / self._batches)
        away, late = queries - self._size, seconds - self._seconds
        self._size += newest * away
        self._seconds += newest * late
        self._variance = (1 - newest) * (self._variance + newest * away * away)
        self._covariance = (1 - newest) * (self._covariance + newest * away * late)
        if self._seen >= LEAST_SEEN:
            average = self._seconds / self._size
            # With similar sizes the slope is noise: use the mean.
            doubt = (DOUBT * self._size) ** 2
            slope = (self._covariance + doubt * average) / (self._variance + doubt)
            self.per_query = min(max(slope, 0.0), average)
            self.fixed = self._seconds - self.per_query * self._size

    def seconds(self, queries: int, largest: int) -> float:
        """Estimates the time of `queries` in batches of at most `largest`; 0 until enough was observed."""
        return math.ceil(queries / largest) * self.fixed + queries * self.per_query

    def queries(self, seconds: float) -> int:
        """Estimates how many queries fit into a batch of `seconds`; 0 until enough was observed."""
        return int(min((seconds - self.fixed) / self.per_query, MOST_QUERIES)) if self.per_query > 0 else 0


class Work(Protocol):
    """One query, or several that stay together: their number, and the tokens of the longest."""

    @property
    def size(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def serving(self) -> object: ...
    def is_wanted(self, now: float) -> bool: ...


W = TypeVar("W", bound=Work)


class Lanes(Generic[W]):
    """Two-priority queue: online before bulk, in batches of one serving, limited in queries and padded tokens.

    A batch with bulk work stays short. After MOST_PASSES batches bulk work goes first, so that it finishes.
    """

    def __init__(self, batch_queries: int, batch_tokens: int) -> None:
        self._batch_queries = batch_queries
        self._batch_tokens = batch_tokens
        self._online: deque[W] = deque()
        self._bulk: deque[W] = deque()
        self._passes = self.online_queries = self.bulk_queries = 0

    def __len__(self) -> int:
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
        """Returns the next batch, and the work dropped because its clients left. Work beyond the limits goes alone."""
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

    def drop_unwanted(self, now: float) -> list[W]:
        """Removes and returns the work whose clients left."""
        dropped: list[W] = []
        for lane in (self._online, self._bulk):
            works = list(lane)
            lane.clear()
            for work in works:
                (lane if work.is_wanted(now) else dropped).append(work)
        self.online_queries = sum(work.size for work in self._online)
        self.bulk_queries = sum(work.size for work in self._bulk)
        return dropped

    def clear(self) -> None:
        self._online.clear()
        self._bulk.clear()
        self.online_queries = self.bulk_queries = 0

    def _least_slice(self) -> int:
        """Returns the minimum number of bulk queries in a batch."""
        tokens, queries = 0, 0
        for work in islice(self._bulk, LEAST_SLICE):
            tokens += work.size * work.length
            if tokens > LEAST_SLICE_TOKENS:
                break
            queries += work.size
        return queries

    def _move(self, lane: deque[W], batch: list[W], dropped: list[W], most: int, now: float) -> int:
        """Moves work from a lane to the batch, up to the limits; returns the number of queries moved or dropped."""
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
