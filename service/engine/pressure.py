"""Whether far more arrives than is done, over the last moments."""

from __future__ import annotations

import math

# How long an arrival counts, and how many times more must arrive than is done.
MEMORY_SECONDS = 0.25
HIGH = 1.5


class Pressure:
    """Two counts that fade: a crowd that comes at once, and clients that wait for their answers, are no pressure."""

    def __init__(self) -> None:
        self._arrived = self._done = self._at = 0.0

    def arrive(self, jobs: int, now: float) -> None:
        self._fade(now)
        self._arrived += jobs

    def finish(self, jobs: int, now: float) -> None:
        self._fade(now)
        self._done += jobs

    def is_high(self, now: float, slack: int) -> bool:
        """`slack`: so many arrivals more than were done are nothing to speak of."""
        self._fade(now)
        return self._arrived > HIGH * self._done + slack

    def _fade(self, now: float) -> None:
        faded = math.exp((self._at - now) / MEMORY_SECONDS)
        self._arrived *= faded
        self._done *= faded
        self._at = now
