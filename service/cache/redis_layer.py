"""The shared layer: values in Redis, read before an answer and written behind its back.

Reads and writes have a breaker each, since a full Redis refuses the one and answers the other. Knows nothing of HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from hmac import compare_digest

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from service.breaker import Breaker
from service.cache.keys import Kind
from service.cache.redis_reads import READS, NoAnswer, RedisReads
from service.cache.redis_writes import OnWrite, RedisWrites

# The number is raised when values of an older release would be read wrongly.
PREFIXES = {Kind.RESULT: b"care:3:r:", Kind.EMBEDDING: b"care:3:e:"}
CHECKSUM_BYTES = 16
# Between attempts to reach a Redis that is away: one request a second waits for it in vain.
PROBE_SECONDS = 1.0
# After which a command is given up, and with it its connection.
GIVE_UP_SECONDS = 1.0

Values = list[bytes | None]


class RedisCache:
    """Values with a keyed checksum over name and value before them.

    A value that another client wrote without the key, or that belongs to another name, is a miss.
    """

    def __init__(self, url: str, key: str, timeout_ms: int, ttl_seconds: int, on_write: OnWrite) -> None:
        self._key = blake2b(key.encode()).digest()
        timeout_seconds = timeout_ms / 1000
        give_up_seconds = max(GIVE_UP_SECONDS, timeout_seconds)
        # No retries: the next request is the retry. Strings are all that travels, for which the older protocol does; it
        # needs no greeting, so a connection is made sooner.
        pool = ConnectionPool.from_url(
            url,
            max_connections=READS + 1,
            socket_timeout=None,  # one limit around each command costs less than one around each piece of its reply
            socket_connect_timeout=give_up_seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._redis = Redis.from_pool(pool)
        self._reads = RedisReads(
            self._redis, Breaker("reading from Redis", PROBE_SECONDS), timeout_seconds, give_up_seconds
        )
        self._writes = RedisWrites(
            self._redis, Breaker("writing to Redis", PROBE_SECONDS), give_up_seconds, ttl_seconds, on_write
        )

    async def get(self, kind: Kind, keys: Sequence[bytes]) -> Values | NoAnswer:
        """A value or None for each key, in order."""
        names = [PREFIXES[kind] + key for key in keys]
        stored = await self._reads.get(names)
        if isinstance(stored, NoAnswer):
            return stored
        return [self._unpack(name, value) for name, value in zip(names, stored, strict=True)]

    def put(self, kind: Kind, values: Mapping[bytes, bytes]) -> None:
        """Returns at once; what Redis cannot take in time is dropped."""
        names = {PREFIXES[kind] + key: value for key, value in values.items()}
        self._writes.put([(name, self._checksum(name, value) + value) for name, value in names.items()])

    async def close(self) -> None:
        await self._reads.close()
        await self._writes.close()
        with contextlib.suppress(Exception):  # a connection that does not let itself be closed ends with the process
            await self._redis.aclose()

    def _checksum(self, name: bytes, value: bytes) -> bytes:
        # All names of a kind have one length, so name and value cannot run into each other.
        return blake2b(name + value, key=self._key, digest_size=CHECKSUM_BYTES).digest()

    def _unpack(self, name: bytes, stored: object) -> bytes | None:
        if not isinstance(stored, bytes):
            return None
        checksum, value = stored[:CHECKSUM_BYTES], stored[CHECKSUM_BYTES:]
        return value if compare_digest(checksum, self._checksum(name, value)) else None
