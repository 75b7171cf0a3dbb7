"""Redis layer of the cache: values are read before a response and written after it.

Look-ups that arrive while a command is under way share the next one: with 8 at a time, 61 µs of CPU each instead of
201 µs through redis-py's own pool, which also lets 32 wait for seconds. A request leaves after milliseconds; its
command goes on and leaves a connection that the next request finds ready.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from service.limits import Breaker


class Kind(StrEnum):
    """What a value is: the JSON of one query's result, or the embedding of one text."""

    RESULT = "result"
    EMBEDDING = "embedding"


# The number changes when values of an older release cannot be read.
PREFIXES = {Kind.RESULT: b"care:3:r:", Kind.EMBEDDING: b"care:3:e:"}
CHECKSUM_BYTES = 16
PROBE_SECONDS = 1.0  # between attempts to reach a Redis that is away
GIVE_UP_SECONDS = 1.0  # after which a command and its connection are dropped
READS = 4  # commands under way at the same time
READ_VALUES = 64  # in one command; a single request may ask for more
WRITE_BYTES = 256 * 1024  # in one command
WAITING_BYTES = 4 * 1024 * 1024  # that wait to be written

Values = list[bytes | None]
OnWrite = Callable[[str, int], None]
"""Receives an outcome (written, dropped or error) and a number of values."""


class NoAnswer(StrEnum):
    """Why Redis gave no answer: it was not asked, or it failed."""

    BYPASS = "bypass"
    ERROR = "error"


class RedisCache:
    """Values behind a keyed checksum of name and value.

    A value written without the key, or under another name, is a miss. Reads and writes have a breaker each, because
    a full Redis still answers reads.
    """

    def __init__(self, url: str, key: str, timeout_ms: int, ttl_seconds: int, on_write: OnWrite) -> None:
        self._key = blake2b(key.encode()).digest()
        timeout_seconds = timeout_ms / 1000
        give_up_seconds = max(GIVE_UP_SECONDS, timeout_seconds)
        # No retries: the next request is the retry. Protocol 2 connects without a greeting.
        pool = ConnectionPool.from_url(
            url,
            max_connections=READS + 1,
            socket_timeout=None,  # one limit around a command costs less than one around each piece of its reply
            socket_connect_timeout=give_up_seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._redis = Redis.from_pool(pool)
        reading, writing = Breaker("reading from Redis", PROBE_SECONDS), Breaker("writing to Redis", PROBE_SECONDS)
        self._reads = RedisReads(self._redis, reading, timeout_seconds, give_up_seconds)
        self._writes = RedisWrites(self._redis, writing, give_up_seconds, ttl_seconds, on_write)

    async def get(self, kind: Kind, keys: Sequence[bytes]) -> Values | NoAnswer:
        """Returns a value or None for each key, in order."""
        names = [PREFIXES[kind] + key for key in keys]
        stored = await self._reads.get(names)
        if isinstance(stored, NoAnswer):
            return stored
        return [self._unpack(name, value) for name, value in zip(names, stored, strict=True)]

    def put(self, kind: Kind, key: bytes, value: bytes) -> None:
        """Returns at once; a value that Redis cannot take in time is dropped."""
        name = PREFIXES[kind] + key
        self._writes.put(name, self._checksum(name, value) + value)

    async def close(self) -> None:
        await self._reads.close()
        await self._writes.close()
        with contextlib.suppress(Exception):  # a connection that cannot be closed ends with the process
            await self._redis.aclose()

    def _checksum(self, name: bytes, value: bytes) -> bytes:
        # All names of a kind have one length, so the border between name and value is clear.
        return blake2b(name + value, key=self._key, digest_size=CHECKSUM_BYTES).digest()

    def _unpack(self, name: bytes, stored: object) -> bytes | None:
        if not isinstance(stored, bytes):
            return None
        checksum, value = stored[:CHECKSUM_BYTES], stored[CHECKSUM_BYTES:]
        return value if compare_digest(checksum, self._checksum(name, value)) else None


@dataclass(slots=True)
class _Command:
    """A command in flight. The breaker gets one report of it: by its reply, or by the first request that leaves."""

    judged: bool = False


@dataclass(slots=True)
class _LookUp:
    names: Sequence[bytes]
    answer: asyncio.Future[Sequence[Any] | None]
    command: _Command | None = None


@dataclass(slots=True)
class RedisReads:
    """Sends look-ups in as few commands as their arrival allows.

    A request leaves after `timeout_seconds`, a command is dropped after `give_up_seconds`. A reader removes itself
    when it finds nothing waiting: after its end it would be too late for a look-up that arrived in between.
    """

    redis: Redis
    breaker: Breaker
    timeout_seconds: float
    give_up_seconds: float
    _waiting: deque[_LookUp] = field(default_factory=deque)
    _readers: set[asyncio.Task[None]] = field(default_factory=set)

    async def get(self, names: Sequence[bytes]) -> Sequence[Any] | NoAnswer:
        """Returns what Redis holds under each name, unchecked."""
        if not self.breaker.allows():
            return NoAnswer.BYPASS
        look_up = _LookUp(names, asyncio.get_running_loop().create_future())
        self._waiting.append(look_up)
        # If others wait already, a reader will take them or all readers are busy.
        if not self._readers or (len(self._waiting) == 1 and len(self._readers) < READS):
            self._readers.add(asyncio.create_task(self._read()))
        try:
            async with asyncio.timeout(self.timeout_seconds):
                stored = await look_up.answer
        except TimeoutError:
            if look_up.command is not None:
                self._judge(look_up.command, "TimeoutError")
            return NoAnswer.ERROR
        return NoAnswer.ERROR if stored is None else stored

    async def close(self) -> None:
        await asyncio.gather(*self._readers)

    def _judge(self, command: _Command, failure: str) -> None:
        """Reports a command to the breaker, once; `failure` is empty if it succeeded."""
        if command.judged:
            return
        command.judged = True
        if failure:
            self.breaker.failed(failure)
        else:
            self.breaker.succeeded()

    async def _read(self) -> None:
        while look_ups := self._take():
            command = _Command()
            for look_up in look_ups:
                look_up.command = command
            stored = await self._send(command, [name for look_up in look_ups for name in look_up.names])
            values = None if stored is None else iter(stored)
            for look_up in look_ups:
                own = None if values is None else [next(values) for _ in look_up.names]
                if not look_up.answer.done():
                    look_up.answer.set_result(own)
        self._readers -= {asyncio.current_task()}

    def _take(self) -> list[_LookUp]:
        taken: list[_LookUp] = []
        values = 0
        while self._waiting and values < READ_VALUES:
            look_up = self._waiting.popleft()
            if not look_up.answer.done():
                taken.append(look_up)
                values += len(look_up.names)
        return taken

    async def _send(self, command: _Command, names: list[bytes]) -> Sequence[Any] | None:
        failure = ""
        try:
            async with asyncio.timeout(self.give_up_seconds):
                stored = await self.redis.mget(names)
            if not isinstance(stored, list) or len(stored) != len(names):
                failure = "a reply of another shape"
        except Exception as error:  # not only RedisError: a malformed reply trips the parser anywhere
            failure = type(error).__name__
        self._judge(command, failure)
        return None if failure else stored


@dataclass(slots=True)
class RedisWrites:
    """Writes values in the background: a bounded queue and one task."""

    redis: Redis
    breaker: Breaker
    give_up_seconds: float
    ttl_seconds: int
    on_write: OnWrite
    waiting_bytes: int = 0
    _waiting: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    _writer: asyncio.Task[None] | None = None

    def put(self, name: bytes, value: bytes) -> None:
        if self.waiting_bytes + len(value) > WAITING_BYTES or not self.breaker.allows():
            self.on_write("dropped", 1)
            return
        self._waiting.append((name, value))
        self.waiting_bytes += len(value)
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer

    async def _write(self) -> None:
        while values := self._take():
            failure = await self._send(values)
            self.on_write("error" if failure else "written", len(values))
            if failure:
                self.breaker.failed(failure)
                # Values behind a failure would fail too.
                self.on_write("dropped", len(self._waiting))
                self._waiting.clear()
                self.waiting_bytes = 0
            else:
                self.breaker.succeeded()
        self._writer = None

    def _take(self) -> list[tuple[bytes, bytes]]:
        taken: list[tuple[bytes, bytes]] = []
        size = 0
        while self._waiting and size < WRITE_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1][1])
        self.waiting_bytes -= size
        return taken

    async def _send(self, values: Sequence[tuple[bytes, bytes]]) -> str:
        """Returns why Redis did not take every value; empty if it did."""
        try:
            async with asyncio.timeout(self.give_up_seconds), self.redis.pipeline(transaction=False) as pipe:
                for name, value in values:
                    pipe.set(name, value, ex=self.ttl_seconds)
                replies = await pipe.execute(raise_on_error=False)
        except Exception as error:  # as in RedisReads
            return type(error).__name__
        return next((type(reply).__name__ for reply in replies if reply is not True), "")
