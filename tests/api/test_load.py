"""Behaviour under concurrent requests: caching, sharing of equal queries, overload, logs."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest

from service.http.app import create_app
from tests.api.gate import WAIT_SECONDS, Gate, block_engine, until_queued
from tests.api.support import Built, client_of, make_settings, running

pytestmark = pytest.mark.anyio


async def post(client: httpx.AsyncClient, **body: object) -> httpx.Response:
    return await client.post("/v1/search", json=body)


async def test_overload_is_refused_at_once_and_accepted_requests_are_answered(built: Built, gate: Gate) -> None:
    settings = make_settings(built, threads=1, reload_seconds=0, queue_limit=2, max_queries=2)
    async with running(settings) as client:
        held = await block_engine(gate, client)
        accepted = asyncio.create_task(post(client, query=["a", "b"]))
        await until_queued(client, 2)
        refused = await post(client, query="c")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        await until_queued(client, 2)
        gate.open.set()
        assert [(await held).status_code, (await accepted).status_code] == [200, 200]
        assert (await post(client, query="c")).status_code == 200


async def test_equal_queries_in_flight_are_computed_once(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0)) as client:
        held = await block_engine(gate, client)
        same = [asyncio.create_task(post(client, query="高血压")) for _ in range(5)]
        other = asyncio.create_task(post(client, query="高血压", top_k=3))
        await until_queued(client, 2)
        gate.open.set()
        answers = [(await task).json()["results"] for task in same]
        await asyncio.gather(held, other)
        assert all(answer == answers[0] for answer in answers)
    assert gate.queries.count("高血压") == 2


async def test_the_process_cache_answers_query_by_query(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, lru_mb=1)) as client:
        first = (await post(client, query=["高血压", "发热"])).json()
        again = (await post(client, query=["发热", "骨折", "高血压"])).json()
        assert again["results"][0] == first["results"][1]
        assert again["results"][2] == first["results"][0]
        assert again["results"][1]["hits"][0]["id"] == "a-5"
        known = (await post(client, query="骨折")).json()
        assert known["timings_ms"]["encode"] == 0.0
        assert known["results"][0] == again["results"][1]
        await post(client, query="骨折", fields=["title"])
        metrics = (await client.get("/metrics")).text
    assert [query for query in gate.queries if query != "ready"] == ["高血压", "发热", "骨折", "骨折"]
    assert 'care_cache_total{kind="result",layer="process",outcome="hit"} 3.0' in metrics
    assert 'care_cache_total{kind="result",layer="process",outcome="miss"} 4.0' in metrics


async def test_readiness_is_never_answered_from_the_cache(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, lru_mb=1)) as client:
        before = len(gate.queries)
        await client.get("/readyz")
        await client.get("/readyz")
    assert gate.queries[before:] == ["ready", "ready"]


async def test_readyz_fails_when_a_query_takes_too_long(built: Built, gate: Gate) -> None:
    settings = make_settings(built, threads=1, reload_seconds=0, queue_limit=1, max_queries=1, probe_timeout_ms=300)
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        held = await block_engine(gate, client)
        waiting = asyncio.create_task(post(client, query="a"))
        await until_queued(client, 1)
        response = await client.get("/readyz")
        assert response.status_code == 503
        assert "300 ms" in response.json()["error"]["message"]
        gate.open.set()
        await asyncio.gather(held, waiting)
        async with asyncio.timeout(WAIT_SECONDS):
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("log_queries", [False, True])
async def test_queries_are_logged_only_if_the_setting_is_on(
    built: Built, caplog: pytest.LogCaptureFixture, log_queries: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = make_settings(built, threads=1, reload_seconds=0, access_log=True, log_queries=log_queries)
    async with running(settings) as client:
        await client.get("/v1/search", params={"q": "很私密的问题"})
        await post(client, query="很私密的问题", top_k=0)
        await client.get("/v1/documents/a-1", headers={"X-Request-Id": "mine"})
    ours = [record for record in caplog.records if record.name.startswith("service")]
    assert any("很私密的问题" in record.getMessage() for record in ours) == log_queries
    lines = [json.loads(record.getMessage()) for record in ours if record.name == "service.access"]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("GET", "/v1/search", 200),
        ("POST", "/v1/search", 422),
        ("GET", "/v1/documents/{id:path}", 200),
    ]
    assert lines[2]["request_id"] == "mine"
    assert lines[0]["milliseconds"] > 0
