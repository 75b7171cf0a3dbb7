"""Waits for an effect that a test cannot await itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_SECONDS = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; fails after a generous timeout."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)
