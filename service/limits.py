"""Rate limits and budgets of API keys, their scopes, and a circuit breaker for failing servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from indexer.store.filters import Filter
    from service.settings import Settings

logger = logging.getLogger(__name__)

FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
RATE = re.compile(r"([1-9][0-9]{0,8})/([smhd])")
PREFIX = b"care:1:rate:"
# The generic cell rate algorithm: one number a key, the time at which its bucket is full again. It is Redis' clock that
# counts, so services whose clocks differ share one bucket. KEYS[1]: name; ARGV: seconds of this cost, of the bucket.
TAKE = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local full = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now) + ARGV[1]
local wait = full - ARGV[2] - now
if wait > 0 then return string.format('%.6f', wait) end
redis.call('SET', KEYS[1], string.format('%.6f', full), 'PX', math.ceil((full - now) * 1000))
return '0'
"""


@dataclass(slots=True)
class Breaker:
    """Opens after a few failures in a row; then allows one attempt every `open_seconds` until one succeeds.

    An attempt without a recorded result (its request was cancelled) counts as failed. `name` appears in the log.
    """

    name: str
    open_seconds: float = OPEN_SECONDS
    clock: Callable[[], float] = time.monotonic
    _failures: int = 0
    _next_attempt: float = 0.0

    def allows(self) -> bool:
        """Returns whether to call now; if so the caller must, or the one attempt of an open breaker is spent."""
        if self._failures < FAILURES_TO_OPEN:
            return True
        now = self.clock()
        if now < self._next_attempt:
            return False
        self._next_attempt = now + self.open_seconds
        return True

    def succeeded(self) -> None:
        """Records a success: closes the breaker."""
        if self._failures >= FAILURES_TO_OPEN:
            logger.warning("%s works again", self.name)
        self._failures = 0

    def failed(self, reason: str) -> None:
        """Records a failure; the reason is logged, so it must not contain a query."""
        self._failures += 1
        if self._failures == FAILURES_TO_OPEN:
            self._next_attempt = self.clock() + self.open_seconds
            logger.warning("%s failed %d times in a row (%s); not asked for a while", self.name, self._failures, reason)


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit of calls in a period: a bucket that holds `count` and is refilled evenly."""

    count: int
    seconds: int

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Reads `50/s`, `600/m`, `1000/h` or `5000/d`; raises ValueError."""
        found = RATE.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a rate; write it as 50/s, 600/m, 1000/h or 5000/d")
        return cls(int(found[1]), UNITS[found[2]])

    def __str__(self) -> str:
        return f"{self.count}/{next(unit for unit, seconds in UNITS.items() if seconds == self.seconds)}"


class Scope(StrEnum):
    """What a key may do; no scope includes another."""

    SEARCH = "search"
    WRITE = "write"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Key:
    """A key in force. `filters` hold for everything that its requests read and write; `tenant` identifies them."""

    id: str
    name: str | None
    scopes: frozenset[Scope]
    filters: tuple[Filter, ...] = ()
    tenant: bytes = b""
    rate: Rate | None = None
    model_calls: Rate | None = None


ANYONE = Key("", None, frozenset({Scope.SEARCH}))
"""The caller of a service without a keys file."""


class Rates:
    """The buckets of all keys: in Redis, which services and workers share, else in this process.

    Without an answer of Redis in time the process's own bucket decides, so a Redis that is away neither stops callers
    nor lifts their limits.
    """

    def __init__(
        self, redis: Redis | None = None, timeout_seconds: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._redis = redis
        self.are_shared = redis is not None
        self._take = None if redis is None else redis.register_script(TAKE)
        self._timeout_seconds = timeout_seconds
        self._breaker = Breaker("the rate limits in Redis", open_seconds=1.0)
        self._clock = clock
        self._full: dict[str, float] = {}

    @classmethod
    def from_settings(cls, settings: Settings) -> Rates:
        """Connects at the first call."""
        if settings.redis_url is None:
            return cls()
        from redis.asyncio import Redis  # the engine process, which needs the breaker alone, does not load it

        return cls(Redis.from_url(settings.redis_url, protocol=2), settings.redis_timeout_ms / 1000)

    async def take(self, name: str, rate: Rate, cost: int = 1) -> float:
        """Takes `cost` calls from the bucket of this name; returns 0, or the seconds to wait if it holds too few."""
        if self._take is not None and self._breaker.allows():
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    seconds = cost * rate.seconds / rate.count
                    wait = float(await self._take([PREFIX + name.encode()], [seconds, rate.seconds]))
                self._breaker.succeeded()
                return wait
            except Exception as error:  # not only RedisError: a malformed reply trips the parser anywhere
                self._breaker.failed(type(error).__name__)
        return self.take_here(name, rate, cost)

    def take_here(self, name: str, rate: Rate, cost: int = 1) -> float:
        """As `take`, from the bucket of this process."""
        now = self._clock()
        full = self._full.get(name, now)
        full = (full if full > now else now) + cost * rate.seconds / rate.count
        if full - rate.seconds > now:
            return full - rate.seconds - now
        self._full[name] = full
        return 0.0

    async def close(self) -> None:
        if self._redis is not None:
            with contextlib.suppress(Exception):  # a connection that cannot be closed ends with the process
                await self._redis.aclose()
