"""Values on their way to Redis, behind the answers' backs. Knows nothing of what the values mean."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from service.breaker import Breaker

# Bytes in one command, and bytes that may wait for theirs.
WRITE_BYTES = 256 * 1024
WAITING_BYTES = 4 * 1024 * 1024

OnWrite = Callable[[str, int], None]
"""Is told what became of so many values: written, dropped or error."""


class RedisWrites:
    """Values on their way to Redis: a bounded heap, and one task that carries it off."""

    def __init__(
        self, redis: Redis, breaker: Breaker, give_up_seconds: float, ttl_seconds: int, on_write: OnWrite
    ) -> None:
        self._redis = redis
        self._breaker = breaker
        self._give_up_seconds = give_up_seconds
        self._ttl_seconds = ttl_seconds
        self._on_write = on_write
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._waiting_bytes = 0
        self._writer: asyncio.Task[None] | None = None

    def put(self, values: Sequence[tuple[bytes, bytes]]) -> None:
        size = sum(len(value) for _, value in values)
        if self._waiting_bytes + size > WAITING_BYTES or not self._breaker.allows():
            self._on_write("dropped", len(values))
            return
        self._waiting.extend(values)
        self._waiting_bytes += size
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer

    async def _write(self) -> None:
        while values := self._take():
            failure = await self._send(values)
            self._on_write("error" if failure else "written", len(values))
            if failure:
                self._breaker.failed(failure)
                self._drop()
            else:
                self._breaker.succeeded()
        self._writer = None

    def _drop(self) -> None:
        """What waits behind a failure would fail too, and hold memory meanwhile."""
        self._on_write("dropped", len(self._waiting))
        self._waiting.clear()
        self._waiting_bytes = 0

    def _take(self) -> list[tuple[bytes, bytes]]:
        taken: list[tuple[bytes, bytes]] = []
        size = 0
        while self._waiting and size < WRITE_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1][1])
        self._waiting_bytes -= size
        return taken

    async def _send(self, values: Sequence[tuple[bytes, bytes]]) -> str:
        """Why Redis did not take every value; empty where it did."""
        try:
            async with asyncio.timeout(self._give_up_seconds), self._redis.pipeline(transaction=False) as pipe:
                for name, value in values:
                    pipe.set(name, value, ex=self._ttl_seconds)
                replies = await pipe.execute(raise_on_error=False)
        except Exception as error:  # as in RedisReads
            return type(error).__name__
        refusals = [type(reply).__name__ for reply in replies if reply is not True]
        return refusals[0] if refusals else ""
