"""Looks every so often, while jobs are in flight, for those whose time is up. One timer, whatever their number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EXPIRY_SECONDS = 0.05


class Expiry:
    """Calls `expire` until it says that nothing is left; `watch` makes it begin again."""

    def __init__(self, expire: Callable[[], bool]) -> None:
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EXPIRY_SECONDS, self._look)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._expire():
            self.watch()
