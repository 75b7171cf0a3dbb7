"""Look-ups on their way to Redis and back. Knows nothing of what the values mean.

Requests do not ask one by one: look-ups that arrive while others are under way travel together in the next command, so
that a crowd costs one round trip and a handful of connections, after a restart of Redis too. Requests wait for
milliseconds and leave; a command, or the connection that is being made for it, may take longer, is never cut short by
one of them, and leaves a connection behind that the next request finds ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from redis.asyncio import Redis

from service.breaker import Breaker

# Commands under way at the same time.
READS = 4
# Values in one command. A single request may ask for more.
READ_VALUES = 64


class NoAnswer(StrEnum):
    """Why Redis has nothing to say about a look-up: it was not asked, or asked in vain."""

    BYPASS = "bypass"
    ERROR = "error"


@dataclass(slots=True)
class _Command:
    """A command under way, judged once: by its reply, or by the first request that leaves before it."""

    judged: bool = False


@dataclass(slots=True)
class _LookUp:
    """What one request asks for, and the command that carries it."""

    names: Sequence[bytes]
    answer: asyncio.Future[Sequence[Any] | None]
    command: _Command | None = None


class RedisReads:
    """Look-ups, sent in as few commands as their arrival allows."""

    def __init__(self, redis: Redis, breaker: Breaker, timeout_seconds: float, give_up_seconds: float) -> None:
        """A request leaves after `timeout_seconds`, a command is given up after `give_up_seconds`."""
        self._redis = redis
        self._breaker = breaker
        self._timeout_seconds = timeout_seconds
        self._give_up_seconds = give_up_seconds
        self._waiting: deque[_LookUp] = deque()
        # Tasks that will look for waiting look-ups once more. Each leaves the set by itself, the moment it found none:
        # were it counted on until it has ended, a look-up that comes in between would wait for nobody.
        self._readers: set[asyncio.Task[None]] = set()

    async def get(self, names: Sequence[bytes]) -> Sequence[Any] | NoAnswer:
        """What Redis holds under each name, unchecked."""
        if not self._breaker.allows():
            return NoAnswer.BYPASS
        look_up = _LookUp(names, asyncio.get_running_loop().create_future())
        self._waiting.append(look_up)
        # Where others wait already, a reader is about to come for them or all are busy.
        if not self._readers or (len(self._waiting) == 1 and len(self._readers) < READS):
            self._readers.add(asyncio.create_task(self._read()))
        try:
            async with asyncio.timeout(self._timeout_seconds):
                stored = await look_up.answer
        except TimeoutError:
            if look_up.command is not None:
                self._judge(look_up.command, "TimeoutError")
            return NoAnswer.ERROR
        return NoAnswer.ERROR if stored is None else stored

    async def close(self) -> None:
        await asyncio.gather(*self._readers)

    def _judge(self, command: _Command, failure: str) -> None:
        """Tells the breaker how a command went; `failure` is empty where it went well."""
        if command.judged:
            return
        command.judged = True
        if failure:
            self._breaker.failed(failure)
        else:
            self._breaker.succeeded()

    async def _read(self) -> None:
        """One command after another while someone waits; a request that gives up takes nobody's answer with it."""
        while look_ups := self._take():
            command = _Command()
            for look_up in look_ups:
                look_up.command = command
            stored = await self._send(command, [name for look_up in look_ups for name in look_up.names])
            begin = 0
            for look_up in look_ups:
                end = begin + len(look_up.names)
                if not look_up.answer.done():
                    look_up.answer.set_result(None if stored is None else stored[begin:end])
                begin = end
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
        """What Redis holds; None where it does not say."""
        failure = ""
        try:
            async with asyncio.timeout(self._give_up_seconds):
                stored = await self._redis.mget(names)
            if not isinstance(stored, list) or len(stored) != len(names):
                failure = "a reply of another shape"
        except Exception as error:  # not only RedisError: a reply that is no Redis's trips the parser anywhere
            failure = type(error).__name__
        self._judge(command, failure)
        return None if failure else stored
