"""A circuit breaker: stops calls to a server that keeps failing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0


class Breaker:
    """Opens after a few failures in a row; then allows one attempt every `open_seconds` until one succeeds.

    An attempt without a recorded result (its request was cancelled) counts as failed. `name` appears in the log.
    """

    def __init__(
        self, name: str, open_seconds: float = OPEN_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._open_seconds = open_seconds
        self._clock = clock
        self._failures = 0
        self._next_attempt = 0.0

    def allows(self) -> bool:
        """Returns whether to call now; if so the caller must, or the one attempt of an open breaker is spent."""
        if self._failures < FAILURES_TO_OPEN:
            return True
        now = self._clock()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + self._open_seconds
        return True

    def succeeded(self) -> None:
        """Records a success: closes the breaker."""
        if self._failures >= FAILURES_TO_OPEN:
            logger.warning("%s works again", self._name)
        self._failures = 0

    def failed(self, reason: str) -> None:
        """Records a failure; the reason is logged, so it must not contain a query."""
        self._failures += 1
        if self._failures == FAILURES_TO_OPEN:
            self._next_attempt = self._clock() + self._open_seconds
            logger.warning(
                "%s failed %d times in a row (%s); not asked for a while", self._name, self._failures, reason
            )
