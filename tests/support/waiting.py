"""Waits for an effect that a test cannot await itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_SECONDS = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; fails after a generous timeout."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object]) -> None:
    """As `until`, for a test without an event loop."""
    give_up = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < give_up, "the condition never held"
        time.sleep(0.02)
