"""Twenty swaps between two snapshots under constant load: no failed request, no answer that mixes versions."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from indexer.store.collection import Collection
from tests.api.support import Built, make_settings, running

SWAPS = 20
CLIENTS = 8
BODIES = [
    {"query": "高血压吃什么药"},
    {"query": ["发热", "骨折", "头痛", "asthma"], "mode": "dense", "fields": ["title"]},
    {"query": "血糖", "mode": "lexical"},
    {"query": ["头痛"] * 12, "mode": "hybrid", "top_k": 5, "fields": ["text"]},
    {"query": "心肺复苏", "filters": [{"field": "kind", "eq": "first-aid"}]},
]


@pytest.mark.anyio
@pytest.mark.parametrize("lru_mb", [0, 1])
async def test_swaps_under_load_fail_no_request_and_mix_no_versions(built: Built, lru_mb: int) -> None:
    Collection(built.root).publish(built.versions["a"])
    answers: list[httpx.Response] = []
    stopped = asyncio.Event()

    async def search_without_pause(client: httpx.AsyncClient, number: int) -> None:
        turn = number
        while not stopped.is_set():
            answers.append(await client.post("/v1/search", json=BODIES[turn % len(BODIES)]))
            turn += 1
            await asyncio.sleep(0.02)  # leave the interpreter to the other threads of this process

    async with (
        running(make_settings(built, threads=1, reload_seconds=0, lru_mb=lru_mb)) as client,
        asyncio.TaskGroup() as clients,  # ends the clients before their service, whatever fails
    ):
        for number in range(CLIENTS):
            clients.create_task(search_without_pause(client, number))
        for swap in range(SWAPS):
            version = built.versions["ba"[swap % 2]]
            await asyncio.to_thread(Collection(built.root).publish, version)
            response = await client.post("/admin/reload")
            assert response.json() == {"snapshot": version, "changed": True}
            seen = len(answers)
            while len(answers) < seen + 2 * CLIENTS:
                await asyncio.sleep(0.001)
        stopped.set()
        assert f"care_swaps_total {SWAPS + 1}.0" in (await client.get("/metrics")).text

    assert [answer.status_code for answer in answers] == [200] * len(answers)
    served = set()
    for answer in answers:
        body = answer.json()
        letter = built.letters[body["snapshot"]]
        served.add(letter)
        ids = [hit["id"] for result in body["results"] for hit in result["hits"]]
        assert ids
        assert all(found.startswith(f"{letter}-") for found in ids)
    assert served == {"a", "b"}
