"""Limits of one search request: values in its filters, bytes in its answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from service.search import searcher
from tests.api.support import ENTRIES, Built, make_settings, running
from tests.api.test_errors import check

pytestmark = pytest.mark.anyio

LINES = {"Accept": "application/x-ndjson"}


def kinds(count: int) -> dict[str, Any]:
    return {"field": "kind", "in": ["drug", *(f"kind {number}" for number in range(count - 1))]}


async def test_the_values_of_all_filters_together_are_bounded(client: httpx.AsyncClient) -> None:
    """Without the limit, 32 filters of 1,000 values would be evaluated on the event loop first."""
    answer = await client.post("/v1/search", json={"query": "药", "filters": [kinds(1000)]})
    assert {hit["metadata"]["kind"] for hit in answer.json()["results"][0]["hits"]} == {"drug"}
    refused = await client.post("/v1/search", json={"query": "药", "filters": [kinds(1000)] * 32})
    assert "32000 values together, at most 1000" in check(refused, 422, "invalid_request", "filters")


@pytest.mark.parametrize(
    "filters",
    [
        [kinds(4)],
        [kinds(3), {"field": "year", "eq": 2024}],
        [kinds(2), {"field": "year", "gte": 2020, "lt": 2026}],
        [{"any": [kinds(2), {"not": {"field": "year", "in": [2020, 2021]}}]}],
    ],
)
async def test_every_value_and_every_bound_of_a_filter_counts(built: Built, filters: list[dict[str, Any]]) -> None:
    for most, status in ((4, 200), (3, 422)):
        async with running(make_settings(built, threads=1, max_filter_values=most)) as client:
            for headers in ({}, LINES):
                answer = await client.post("/v1/search", json={"query": "药", "filters": filters}, headers=headers)
                assert answer.status_code == status


async def test_embeddings_beyond_the_byte_limit_are_refused_and_base64_is_smaller(built: Built) -> None:
    async with running(make_settings(built, threads=1, max_answer_bytes=4096)) as client:
        texts: dict[str, Any] = {"input": ["a"], "dimensions": 400}
        message = check(await client.post("/v1/embeddings", json=texts), 422, "invalid_request", "input")
        assert "about 5000 bytes, 4096 are allowed; send fewer texts" in message
        assert (await client.post("/v1/embeddings", json=texts | {"encoding_format": "base64"})).status_code == 200


async def test_an_answer_beyond_the_limit_is_refused_unless_it_is_streamed(built: Built) -> None:
    """A short request may name many queries and whole texts."""
    whole = {"query": [entry["title"] for entry in ENTRIES], "fields": ["text"], "top_k": 8}
    async with running(make_settings(built, threads=1, max_answer_bytes=4096, lru_mb=1)) as client:
        for _ in range(2):  # computed, then from the cache
            message = check(await client.post("/v1/search", json=whole), 422, "invalid_request", "query")
            for less in ("4096 bytes", "fewer queries", "top_k", "fields", "application/x-ndjson"):
                assert less in message
        streamed = await client.post("/v1/search", json=whole, headers=LINES)
        assert streamed.status_code == 200
        assert len(streamed.text.splitlines()) == len(ENTRIES) + 1
        assert len(streamed.content) > 4096
        assert (await client.post("/v1/search", json=whole | {"query": "血常规", "top_k": 1})).status_code == 200


async def test_other_requests_have_their_turn_between_two_results(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of many hits takes milliseconds to write; hundreds of them without a pause would stop the service."""
    turn, written, write = 0, Counter[int](), searcher._Run.write

    def counted(*result: Any) -> bytes:  # noqa: ANN401 - passed on
        written[turn] += 1
        return write(*result)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(searcher._Run, "write", counted)
    async with running(make_settings(built, threads=1, queue_limit=1024, timeout_ms=60_000)) as client:
        ticking = asyncio.ensure_future(count_turns())
        body = {"query": [f"头痛 {number}" for number in range(200)], "cache": False}
        answer = await client.post("/v1/search", json=body)
        ticking.cancel()
    assert len(answer.json()["results"]) == 200 <= sum(written.values())
    assert max(written.values()) <= 2
