"""Look-ups that share commands: each is answered, in any order of events. Redis is a stand-in here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from service.cache.redis import READ_VALUES, READS, NoAnswer, RedisReads
from service.limits import Breaker

pytestmark = pytest.mark.anyio

PATIENT_SECONDS = 60.0


class Held:
    """A Redis whose every key holds its own name, and which answers when it is told to."""

    def __init__(self) -> None:
        self.commands: list[tuple[Sequence[bytes], asyncio.Future[None]]] = []
        self.held = True

    async def mget(self, names: Sequence[bytes]) -> list[bytes]:
        told = asyncio.get_running_loop().create_future()
        self.commands.append((names, told))
        if self.held:
            await told
        return list(names)

    def answer(self) -> None:
        for _, told in self.commands:
            if not told.done():
                told.set_result(None)


def reads_from(redis: Held, timeout_seconds: float = PATIENT_SECONDS) -> RedisReads:
    return RedisReads(cast(Redis, redis), Breaker("the test"), timeout_seconds, PATIENT_SECONDS)


async def spin(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_commands_are_few_and_each_gets_its_own_values() -> None:
    redis = Held()
    reads = reads_from(redis)
    asked: list[asyncio.Task[Any]] = []
    for number in range(10 * READS):
        asked.append(asyncio.create_task(reads.get([b"%d" % number, b"b"])))
        await spin(3)
    assert len(redis.commands) == READS
    redis.held = False
    redis.answer()
    assert await asyncio.gather(*asked) == [[b"%d" % number, b"b"] for number in range(10 * READS)]
    assert len(redis.commands) == READS + -(-9 * READS * 2 // READ_VALUES)
    await reads.close()


@pytest.mark.parametrize("turns", range(8))
async def test_a_look_up_that_arrives_as_the_readers_end_is_answered(turns: int) -> None:
    redis = Held()
    reads = reads_from(redis)
    asked = []
    for number in range(READS):
        asked.append(asyncio.create_task(reads.get([b"%d" % number])))
        await spin(3)
    assert len(redis.commands) == READS
    redis.held = False
    redis.answer()
    await spin(turns)
    async with asyncio.timeout(PATIENT_SECONDS / 2):
        assert await asyncio.gather(reads.get([b"late"]), reads.get([b"later"])) == [[b"late"], [b"later"]]
        await asyncio.gather(*asked)
    await reads.close()


async def test_a_command_fails_once_however_many_leave_it() -> None:
    redis = Held()
    reads = reads_from(redis, timeout_seconds=0.05)
    crowd = await asyncio.gather(*[reads.get([b"%d" % number]) for number in range(50)])
    assert set(crowd) == {NoAnswer.ERROR}
    assert len(redis.commands) == 1
    assert await reads.get([b"again"]) is NoAnswer.ERROR  # and not a bypass: there was one failure, not fifty
    redis.answer()
    await reads.close()
