"""How long a batch will take, learned from the batches that ran: a fixed part, and a part for each query."""

from __future__ import annotations

import math

# The weight of the newest batch: the last twenty or so count.
NEWEST = 0.1
# Nothing is foretold from fewer queries than this: the first ones are slow.
LEAST_SEEN = 10
# A batch counts as at most so many times as long as was foretold: the machine stood still, not the engine.
MOST_LATE = 4.0
# Sizes that spread by this share of their mean say as much of the slope as their average does.
DOUBT = 0.25
# No batch is larger.
MOST_QUERIES = 1_000_000


class CostModel:
    """seconds = fixed + per_query · queries, fitted to a moving average of what was seen.

    A processor pays per query, a graphics card mostly per batch; neither is told in advance. With batches of one size
    only, the two parts cannot be told apart, and all of it counts as per query: the careful guess.
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
            self._fit()

    def seconds(self, queries: int, largest: int) -> float:
        """The time of so many queries in batches of at most `largest`; 0 until enough was seen."""
        return math.ceil(queries / largest) * self.fixed + queries * self.per_query

    def queries(self, seconds: float) -> int:
        """How many queries a batch of so many seconds holds; 0 until enough was seen."""
        return int(min((seconds - self.fixed) / self.per_query, MOST_QUERIES)) if self.per_query > 0 else 0

    def usual(self, seconds: float) -> int:
        """How many queries were done in so many seconds, as they came; 0 until enough was seen.

        Less than a larger batch would hold, but no guess: a slope that noise made small would promise any number.
        """
        if self._seen < LEAST_SEEN or not self._seconds:
            return 0
        return round(min(seconds * self._size / self._seconds, MOST_QUERIES))

    def _fit(self) -> None:
        average = self._seconds / self._size
        # The less the sizes differ, the less they say of the slope, which noise would make anything: then the average.
        doubt = (DOUBT * self._size) ** 2
        slope = (self._covariance + doubt * average) / (self._variance + doubt)
        self.per_query = min(max(slope, 0.0), average)
        self.fixed = self._seconds - self.per_query * self._size
