"""Look-ups that share Redis commands: each is answered, in any order of events, with a fake Redis."""

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


class FakeRedis:
    """A fake Redis in which every key holds its own name; it answers when `answer` is called."""

    def __init__(self) -> None:
        self.commands: list[tuple[Sequence[bytes], asyncio.Future[None]]] = []
        self.held = True

    async def mget(self, names: Sequence[bytes]) -> list[bytes]:
        answered = asyncio.get_running_loop().create_future()
        self.commands.append((names, answered))
        if self.held:
            await answered
        return list(names)

    def answer(self) -> None:
        for _, answered in self.commands:
            if not answered.done():
                answered.set_result(None)


def reads_from(redis: FakeRedis, timeout_seconds: float = PATIENT_SECONDS) -> RedisReads:
    return RedisReads(cast(Redis, redis), Breaker("the test"), timeout_seconds, PATIENT_SECONDS)


async def spin(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_look_ups_share_few_commands_and_each_gets_its_own_values() -> None:
    redis = FakeRedis()
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
    redis = FakeRedis()
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


async def test_a_timed_out_command_counts_as_one_failure_however_many_look_ups_shared_it() -> None:
    redis = FakeRedis()
    reads = reads_from(redis, timeout_seconds=0.05)
    crowd = await asyncio.gather(*[reads.get([b"%d" % number]) for number in range(50)])
    assert set(crowd) == {NoAnswer.ERROR}
    assert len(redis.commands) == 1
    assert await reads.get([b"again"]) is NoAnswer.ERROR  # not a bypass: the breaker counted one failure, not fifty
    redis.answer()
    await reads.close()
