"""Answers as JSON lines: each result is sent as soon as it is known, for any number of queries."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from service.search.portions import WINDOW
from tests.api.gate import Gate, block_engine, until_queued
from tests.api.support import Built, copy_collection, make_settings, running

pytestmark = pytest.mark.anyio

LINES = {"Accept": "application/x-ndjson"}
MANY = [f"头痛 q{number}" for number in range(2 * WINDOW)]


async def lines_of(client: httpx.AsyncClient, **body: object) -> list[dict]:
    response = await client.post("/v1/search", json=body, headers=LINES)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


async def test_lines_have_the_content_of_the_whole_answer(client: httpx.AsyncClient, built: Built) -> None:
    queries = ["高血压", "发热", "骨折", "asthma"]
    whole = (await client.post("/v1/search", json={"query": queries, "mode": "lexical"})).json()
    *results, end = await lines_of(client, query=queries, mode="lexical")
    assert results == whole["results"]
    assert end["snapshot"] == built.versions["a"]
    assert set(end["timings_ms"]) == set(whole["timings_ms"])


async def test_no_character_of_a_text_ends_a_line(built: Built, tmp_path: Path) -> None:
    own = copy_collection(built, tmp_path / "collection")
    text = "缬沙坦\x85第二行\u2028第三行\u2029第四行\x0b\x0c\x1c\n"
    async with running(make_settings(own, threads=1)) as client:
        posted = await client.post("/v1/documents", json={"documents": [{"id": "lines", "title": text, "text": text}]})
        assert posted.status_code == 200
        *results, _ = await lines_of(client, query=["缬沙坦"], mode="lexical", fields=["title", "text"], top_k=1)
    assert results[0]["hits"][0]["text"] == results[0]["hits"][0]["title"] == text


@pytest.mark.parametrize(
    ("accept", "streams"),
    [("application/x-ndjson", True), ("*/*", False), ("application/json", False),
     ("application/json, application/x-ndjson", False), ("text/plain, application/x-ndjson;q=0.9", True)],
)  # fmt: skip
async def test_only_a_request_for_lines_gets_lines(client: httpx.AsyncClient, accept: str, streams: bool) -> None:
    response = await client.get("/v1/search", params={"q": "头痛"}, headers={"Accept": accept})
    assert (response.headers["content-type"] == "application/x-ndjson") == streams


async def test_a_stream_takes_more_queries_than_a_whole_answer_and_keeps_their_order(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, max_queries=16, lru_mb=1)) as client:
        assert (await client.post("/v1/search", json={"query": MANY})).status_code == 422
        # Results from the cache and from the engine, mixed.
        await lines_of(client, query=MANY[::3], mode="lexical", top_k=1)
        *results, _ = await lines_of(client, query=[*MANY, "高血压 氨氯地平"], mode="lexical", top_k=1)
    assert len(results) == len(MANY) + 1
    assert [result["hits"][0]["id"] for result in results] == ["a-6"] * len(MANY) + ["a-1"]


async def test_too_many_queries_are_refused(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, max_stream_queries=20)) as client:
        response = await client.post("/v1/search", json={"query": MANY[:21]}, headers=LINES)
        assert response.status_code == 422
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["field"] == "query"
        assert len(await lines_of(client, query=MANY[:20])) == 21


async def test_a_stream_never_fills_the_queue(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0)) as client:
        held = await block_engine(gate, client)
        stream = asyncio.create_task(lines_of(client, query=MANY, mode="lexical", top_k=1))
        queued = 0.0
        async with asyncio.timeout(60):
            while queued < WINDOW:
                await asyncio.sleep(0.01)
                queued = await queue_length(client)
        await asyncio.sleep(0.05)
        assert await queue_length(client) <= WINDOW
        gate.open.set()
        assert len(await stream) == len(MANY) + 1
        await held


async def test_a_queue_smaller_than_a_portion_works(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, queue_limit=3, max_queries=3)) as client:
        assert len(await lines_of(client, query=MANY[:20], top_k=1)) == 21


async def test_a_failure_before_the_first_line_is_an_ordinary_error(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr(gate, "run", fail)
    response = await client.post("/v1/search", json={"query": ["发热", "骨折"]}, headers=LINES)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_failed"


async def test_a_later_failure_is_reported_in_the_last_line(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    run = gate.run

    def fail_late(*arguments: object) -> object:
        return fail() if len(gate.queries) >= WINDOW else run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(gate, "run", fail_late)
    lines = await lines_of(client, query=MANY, mode="lexical", top_k=1)
    assert 0 < len(lines) - 1 < len(MANY)
    assert all("hits" in line for line in lines[:-1])
    assert lines[-1]["error"]["code"] == "engine_failed"
    assert lines[-1]["error"]["request_id"]


async def test_a_stream_has_a_size_limit(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, max_stream_bytes=4096)) as client:
        *results, last = await lines_of(client, query=MANY, mode="lexical", top_k=1)
        whole = "".join(json.dumps(each, ensure_ascii=False, separators=(",", ":")) + "\n" for each in results)
        assert 2048 < len(whole.encode()) <= 4096
        assert (last["error"]["code"], last["error"]["field"]) == ("invalid_request", "query")
        assert f"ask again for the queries after the first {len(results)}" in last["error"]["message"]
    async with running(make_settings(built, threads=1, reload_seconds=0, max_stream_bytes=1024)) as client:
        refused = await client.post("/v1/search", json={"query": ["头痛"], "fields": ["text"]}, headers=LINES)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request")
        assert "CARE_MAX_STREAM_BYTES); ask for fewer hits or fields" in refused.json()["error"]["message"]


async def test_a_stream_has_a_time_limit(built: Built, gate: Gate) -> None:
    """The clock runs while the engine is blocked; results answered before that were sent."""
    async with running(make_settings(built, threads=1, reload_seconds=0, max_stream_seconds=0.2)) as client:
        held = await block_engine(gate, client)
        stream = asyncio.create_task(client.post("/v1/search", json={"query": MANY[:3]}, headers=LINES))
        await until_queued(client, 3)  # the clock runs
        await asyncio.sleep(0.3)
        gate.open.set()
        refused = await stream
        assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "more than 0.2 s (CARE_MAX_STREAM_SECONDS)" in refused.json()["error"]["message"]
        await held


def fail(*arguments: object) -> None:
    raise RuntimeError("the device is gone")


async def queue_length(client: httpx.AsyncClient) -> float:
    metrics = (await client.get("/metrics")).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("care_queue_length ")]
    return float(line.split()[1])
