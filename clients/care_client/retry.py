"""When to try again, and how long to wait before: the decisions alone, the waiting is the clients'."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long. Every call may be repeated: it reads, or says twice what holds once.

    The wait before attempt n is drawn between half and all of `first_seconds` · 2ⁿ, never above `longest_seconds`, and
    never below what the service asks for. A call gives up rather than wait for more than `total_seconds` altogether.
    """

    attempts: int = 4
    first_seconds: float = 0.1
    longest_seconds: float = 5.0
    total_seconds: float = 15.0


@dataclass(slots=True)
class Attempts:
    """The attempts of one call so far."""

    retry: Retry
    made: int = field(default=0, init=False)
    waited_seconds: float = field(default=0.0, init=False)

    def next_wait(self, asked_seconds: float = 0.0) -> float | None:
        """Seconds until the next attempt after one that failed; None when that was the last."""
        self.made += 1
        if self.made >= self.retry.attempts:
            return None
        backoff = min(self.retry.longest_seconds, self.retry.first_seconds * 2.0 ** (self.made - 1))
        wait = max(asked_seconds, backoff * random.uniform(0.5, 1.0))
        if self.waited_seconds + wait > self.retry.total_seconds:
            return None
        self.waited_seconds += wait
        return wait
