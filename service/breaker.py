"""A circuit breaker: stops asking a server that keeps failing. Knows nothing of what is asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0


class Breaker:
    """Open after a few failures in a row; then one attempt at a time, each a while after the last, until one succeeds.

    An attempt whose end nobody records (its request was cancelled) counts as failed: the next comes in its turn.
    """

    def __init__(
        self, name: str, open_seconds: float = OPEN_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`name` says in the log what it is that fails; attempts come `open_seconds` apart."""
        self._name = name
        self._open_seconds = open_seconds
        self._clock = clock
        self._failures = 0
        self._next_attempt = 0.0

    def allows(self) -> bool:
        """Whether to ask now; whoever is told so must ask, or the one attempt of an open breaker is spent."""
        if self._failures < FAILURES_TO_OPEN:
            return True
        now = self._clock()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + self._open_seconds
        return True

    def succeeded(self) -> None:
        """Asking worked: everyone may ask again."""
        if self._failures >= FAILURES_TO_OPEN:
            logger.warning("%s works again", self._name)
        self._failures = 0

    def failed(self, reason: str) -> None:
        """Asking did not work; the reason goes to the log, so it must tell nothing of what was asked."""
        self._failures += 1
        if self._failures == FAILURES_TO_OPEN:
            self._next_attempt = self._clock() + self._open_seconds
            logger.warning(
                "%s failed %d times in a row (%s); not asked for a while", self._name, self._failures, reason
            )
