"""A serving brought up to the log: what the log holds beyond it is laid over. Knows nothing of who serves what."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from indexer.store.fresh_log import FreshLog
from indexer.store.overlay import Overlay
from service.fresh.encode import DocumentEncoder
from service.serving import Serving


class Freshener:
    """Reads the log of one collection, for any serving of it."""

    def __init__(self, log: FreshLog, encoder: DocumentEncoder) -> None:
        self._log = log
        self._encoder = encoder

    async def __call__(self, serving: Serving) -> Serving:
        """The serving with all that the log holds now; itself where nothing was added. Raises BadLog."""
        frames, cursor = await asyncio.to_thread(self._log.read, serving.cursor)
        if cursor == serving.cursor:
            return serving
        if not frames:
            return replace(serving, cursor=cursor)
        readable = await self._encoder.translate(serving, frames)
        overlay = serving.fresh or Overlay.over(serving.snapshot)
        return replace(serving, fresh=await asyncio.to_thread(overlay.apply, readable), cursor=cursor)
