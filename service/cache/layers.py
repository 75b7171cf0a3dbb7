"""The two layers as one cache, nearest first; either or both may be off. Knows nothing of what the values mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.cache.keys import Kind
from service.cache.process import ProcessCache
from service.cache.redis_layer import RedisCache
from service.cache.redis_reads import NoAnswer
from service.metrics import Metrics
from service.settings import Settings

MEGABYTE = 1024 * 1024
# Of the process's memory for the cache. Results and embeddings do not push each other out: a swap makes all results
# worthless at once, and then the embeddings must still be there.
EMBEDDING_SHARE = 0.25


class Cache:
    """Values by kind and key; every look-up and its outcome is counted by layer and kind."""

    def __init__(self, process: Mapping[Kind, ProcessCache], redis: RedisCache | None, metrics: Metrics) -> None:
        """`process` holds a cache for every kind, or nothing where that layer is off."""
        self._process = process
        self._redis = redis
        self._metrics = metrics
        self.enabled = bool(process) or redis is not None

    @classmethod
    def from_settings(cls, settings: Settings, metrics: Metrics) -> Cache:
        process = {}
        if settings.lru_mb:
            embeddings = int(settings.lru_mb * MEGABYTE * EMBEDDING_SHARE)
            process[Kind.EMBEDDING] = ProcessCache(embeddings)
            process[Kind.RESULT] = ProcessCache(settings.lru_mb * MEGABYTE - embeddings)
        redis = None
        if settings.redis_url:
            redis = RedisCache(
                settings.redis_url,
                settings.redis_key.get_secret_value(),
                settings.redis_timeout_ms,
                settings.redis_ttl_seconds,
                metrics.cache_write,
            )
        return cls(process, redis, metrics)

    async def get(self, kind: Kind, keys: Sequence[bytes]) -> list[bytes | None]:
        """A value or None for each key, in order."""
        values: list[bytes | None] = [None] * len(keys)
        near = self._process.get(kind)
        if near is not None:
            values = [near.get(key) for key in keys]
            self._count("process", kind, values)
        missing = [position for position, value in enumerate(values) if value is None]
        if self._redis is None or not missing:
            return values
        stored = await self._redis.get(kind, [keys[position] for position in missing])
        if isinstance(stored, NoAnswer):
            self._metrics.cache("redis", kind, stored, len(missing))
            return values
        self._count("redis", kind, stored)
        for position, value in zip(missing, stored, strict=True):
            values[position] = value
            if value is not None and near is not None:
                near.put(keys[position], value)
        return values

    def put(self, kind: Kind, values: Mapping[bytes, bytes]) -> None:
        if kind in self._process:
            for key, value in values.items():
                self._process[kind].put(key, value)
        if self._redis is not None:
            self._redis.put(kind, values)

    def bypass(self, kind: Kind, count: int) -> None:
        """Counts look-ups that were not made because the answer must not come from a cache."""
        if self._process:
            self._metrics.cache("process", kind, NoAnswer.BYPASS, count)
        if self._redis is not None:
            self._metrics.cache("redis", kind, NoAnswer.BYPASS, count)

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.close()

    def _count(self, layer: str, kind: Kind, values: Sequence[bytes | None]) -> None:
        misses = values.count(None)
        if misses:
            self._metrics.cache(layer, kind, "miss", misses)
        if misses < len(values):
            self._metrics.cache(layer, kind, "hit", len(values) - misses)
