"""Results that were computed before: in this process, and in a Redis that several processes share.

A value is the finished JSON of one query's result; its key is made of the snapshot, the encoder and every parameter,
so a swap needs no invalidation. Redis being slow, full or away costs a request a few milliseconds and never more:
no error of the cache reaches its caller. Knows nothing of what the values mean.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from service.metrics import Metrics
from service.settings import Settings

logger = logging.getLogger(__name__)

KEY_PREFIX = b"care:1:"
CHECKSUM_BYTES = 4
REDIS_CONNECTIONS = 32
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0
MAX_WRITES = 64
# What an entry takes beside its value: its key, two objects' heads and its place in the table.
ENTRY_BYTES = 250


def key_of(*facts: object) -> bytes:
    """A key that gives nothing of the query away. The facts' repr tells 1 from "1" and one list from another."""
    return blake2b(repr(facts).encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ProcessCache:
    """The least recently used values go first once they take more than the limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, key: bytes) -> bytes | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: bytes) -> None:
        if len(value) + ENTRY_BYTES > self._max_bytes:
            return
        if (known := self._values.pop(key, None)) is not None:
            self._bytes -= len(known) + ENTRY_BYTES
        self._values[key] = value
        self._bytes += len(value) + ENTRY_BYTES
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._values.popitem(last=False)[1]) + ENTRY_BYTES


class Breaker:
    """Stops asking a server that keeps failing; lets one request try again after a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0

    def allows(self) -> bool:
        if self._failures < FAILURES_TO_OPEN:
            return True
        if self._clock() < self._open_until:
            return False
        self._open_until = self._clock() + OPEN_SECONDS
        return True

    def record(self, *, success: bool) -> None:
        self._failures = 0 if success else self._failures + 1
        if self._failures == FAILURES_TO_OPEN:
            self._open_until = self._clock() + OPEN_SECONDS
            logger.warning("Redis failed %d times in a row; going on without it", FAILURES_TO_OPEN)


class RedisCache:
    """Values with a checksum before them: what another writer left under our key is a miss, not an answer."""

    def __init__(self, url: str, timeout_ms: int, ttl_seconds: int) -> None:
        self._timeout_seconds = timeout_ms / 1000
        self._ttl_seconds = ttl_seconds
        # No retries: the next request is the retry. The pool waits rather than opening a connection per request.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=REDIS_CONNECTIONS,
            timeout=self._timeout_seconds,
            socket_timeout=self._timeout_seconds,
            socket_connect_timeout=self._timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = Redis.from_pool(pool)
        self._breaker = Breaker()
        self._writes: set[asyncio.Task[None]] = set()

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None] | None:
        """A value or None for each key; None altogether where Redis did not answer."""
        if not self._breaker.allows():
            return None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                stored = await self._redis.mget([KEY_PREFIX + key for key in keys])
        except (RedisError, OSError, TimeoutError):
            self._breaker.record(success=False)
            return None
        self._breaker.record(success=True)
        return [_unpack(value) for value in stored]

    def put(self, values: Mapping[bytes, bytes]) -> None:
        """Writes behind the answer's back; a crowd of writes that Redis cannot take is dropped."""
        if len(self._writes) < MAX_WRITES and self._breaker.allows():
            task = asyncio.create_task(self._write(values))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._writes)
        await self._redis.aclose()

    async def _write(self, values: Mapping[bytes, bytes]) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds), self._redis.pipeline(transaction=False) as pipe:
                for key, value in values.items():
                    pipe.set(KEY_PREFIX + key, _pack(value), ex=self._ttl_seconds)
                await pipe.execute()
        except (RedisError, OSError, TimeoutError):
            self._breaker.record(success=False)


class Cache:
    """The two layers, nearest first; either or both may be off."""

    def __init__(self, process: ProcessCache | None, redis: RedisCache | None, metrics: Metrics) -> None:
        self._process = process
        self._redis = redis
        self._metrics = metrics
        self.enabled = process is not None or redis is not None

    @classmethod
    def from_settings(cls, settings: Settings, metrics: Metrics) -> Cache:
        process = ProcessCache(settings.lru_mb * 1024 * 1024) if settings.lru_mb else None
        redis = None
        if settings.redis_url:
            redis = RedisCache(settings.redis_url, settings.redis_timeout_ms, settings.redis_ttl_seconds)
        return cls(process, redis, metrics)

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """A value or None for each key, in order."""
        values: list[bytes | None] = [None] * len(keys)
        if self._process is not None:
            values = [self._process.get(key) for key in keys]
            self._count("process", values)
        missing = [position for position, value in enumerate(values) if value is None]
        if self._redis is None or not missing:
            return values
        stored = await self._redis.get([keys[position] for position in missing])
        if stored is None:
            self._metrics.cache("redis", "error", len(missing))
            return values
        self._count("redis", stored)
        for position, value in zip(missing, stored, strict=True):
            values[position] = value
            if value is not None and self._process is not None:
                self._process.put(keys[position], value)
        return values

    def put(self, values: Mapping[bytes, bytes]) -> None:
        if self._process is not None:
            for key, value in values.items():
                self._process.put(key, value)
        if self._redis is not None:
            self._redis.put(values)

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.close()

    def _count(self, layer: str, values: Sequence[bytes | None]) -> None:
        misses = values.count(None)
        self._metrics.cache(layer, "hit", len(values) - misses)
        self._metrics.cache(layer, "miss", misses)


def _pack(value: bytes) -> bytes:
    return zlib.crc32(value).to_bytes(CHECKSUM_BYTES, "big") + value


def _unpack(stored: bytes | str | None) -> bytes | None:
    if not isinstance(stored, bytes):
        return None
    value = stored[CHECKSUM_BYTES:]
    return value if stored == _pack(value) else None
