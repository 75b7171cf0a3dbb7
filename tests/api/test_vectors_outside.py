"""A service that searches in process and one whose vectors are in a database give the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from indexer.checks import recall_queries
from indexer.errors import BadCollection, DatabaseAway
from indexer.store.collection import Collection, Database
from indexer.versions import Measure, publish
from models.encoder.onnx import OnnxEncoder
from service.limits import FAILURES_TO_OPEN
from tests.api.support import Built, copy_collection, make_settings, running
from tests.support.qdrant_server import QdrantServer, qdrant

pytestmark = pytest.mark.anyio

WAIT_SECONDS = 60
DRUGS = {"field": "kind", "eq": "drug"}
REQUESTS: list[dict[str, Any]] = [
    {"query": "高血压吃什么药", "mode": "dense"},
    {"query": "高血压吃什么药", "mode": "hybrid", "explain": True},
    {"query": "头痛怎么办", "mode": "dense", "passages": 20, "top_k": 8, "fields": ["title", "snippet", "metadata"]},
    {"query": "头痛怎么办", "mode": "hybrid", "passages": 20, "top_k": 8},
    {"query": ["发热", "asthma", "骨折", "血糖高"], "top_k": 5},
    {"query": "药", "mode": "dense", "filters": [DRUGS]},
    {"query": "药", "mode": "hybrid", "filters": [DRUGS]},
    {"query": "药", "mode": "lexical", "filters": [DRUGS]},
    {"query": "药", "mode": "dense", "filters": [{"field": "kind", "in": ["drug", "test", "absent"]}]},
    {"query": "药", "mode": "dense", "filters": [{"field": "kind", "gte": "drug", "lt": "g"}]},
    {"query": "药", "mode": "dense", "filters": [{"field": "kind", "eq": "absent"}]},
    {"query": "药", "mode": "dense", "filters": [{"field": "year", "gte": 2022, "lt": 2025}, DRUGS]},
    {"query": ["药", "急救"], "mode": "hybrid", "filters": [{"field": "year", "eq": 2025}], "min_score": 0.1},
]


def measure(encoder: OnnxEncoder) -> Measure:
    return Measure(lambda snapshot: recall_queries(encoder, snapshot.documents), 0.95)


class Outside:
    """A collection whose first version is published to a database."""

    def __init__(self, built: Built, server: QdrantServer, encoder: OnnxEncoder) -> None:
        self.built = built
        self.server = server
        self.collection = Collection(built.root, Database.parse(server.where(), None, 30))
        self._measure = measure(encoder)
        self.publish("a")

    def publish(self, letter: str) -> None:
        publish(self.collection, self.built.versions[letter], self._measure)

    def settings(self, **values: object) -> Any:  # noqa: ANN401 - Settings, with any values
        own = {"threads": 1, "reload_seconds": 0, "vectors": self.server.where(), "vectors_timeout_seconds": 30}
        return make_settings(self.built, **(own | values))


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    with qdrant() as server:
        yield server


@pytest.fixture
def outside(built: Built, encoder: OnnxEncoder, server: QdrantServer, tmp_path: Path) -> Outside:
    return Outside(copy_collection(built, tmp_path / "collection"), server, encoder)


@pytest.fixture
async def client_outside(outside: Outside) -> AsyncIterator[httpx.AsyncClient]:
    async with running(outside.settings()) as client:
        yield client


def same(ours: object, theirs: object) -> bool:
    """Compares values; scores may differ in the last digits, since one sums in numpy and the other in FAISS."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return bool(np.isclose(ours, theirs, atol=1e-4))
    return ours == theirs


def results(answer: httpx.Response) -> Any:  # noqa: ANN401 - JSON
    """Returns the results with passages in text order: passages of repeated sentences tie, and their order is open."""
    found = answer.json()["results"]
    for hit in (hit for result in found for hit in result["hits"] if "passages" in hit):
        hit["passages"].sort(key=lambda passage: passage["span"])
    return found


async def test_every_request_is_answered_as_by_the_in_process_index(
    client: httpx.AsyncClient, client_outside: httpx.AsyncClient
) -> None:
    for request in REQUESTS:
        here, there = [await one.post("/v1/search", json=request) for one in (client, client_outside)]
        assert (here.status_code, there.status_code) == (200, 200), request
        assert same(results(there), results(here)), request
        assert there.json()["snapshot"] == here.json()["snapshot"]


async def test_a_bad_filter_is_refused_as_by_the_in_process_index(
    client: httpx.AsyncClient, client_outside: httpx.AsyncClient
) -> None:
    for bad in ({"field": "none", "eq": "x"}, {"field": "year", "eq": "soon"}):
        request = {"query": "药", "filters": [bad]}
        here, there = [(await one.post("/v1/search", json=request)) for one in (client, client_outside)]
        assert here.status_code == there.status_code == 422
        assert here.json()["error"]["message"] == there.json()["error"]["message"]


async def test_a_version_keeps_answering_while_the_alias_names_another(outside: Outside) -> None:
    async with running(outside.settings()) as client:
        outside.publish("b")
        assert outside.server.aliases() == {"care": f"care-{outside.built.versions['b']}"}
        answer = (await client.post("/v1/search", json={"query": "高血压", "mode": "dense"})).json()
        assert answer["snapshot"] == outside.built.versions["a"]
        assert {hit["id"][0] for hit in answer["results"][0]["hits"]} == {"a"}
        assert (await client.post("/admin/reload")).json()["snapshot"] == outside.built.versions["b"]
        back = await client.post("/admin/rollback")
        assert back.json() == {"snapshot": outside.built.versions["a"], "changed": True}
        assert outside.server.aliases() == {"care": f"care-{outside.built.versions['a']}"}


async def test_fresh_documents_override_hits_of_the_database(outside: Outside) -> None:
    fresh = {"id": "a-1", "title": "氨氯地平", "text": "氨氯地平的新说明。", "metadata": {"region": "华北"}}
    async with running(outside.settings()) as client:
        opened = outside.server.asked["GET exists"]
        assert (await client.post("/v1/documents", json={"documents": [fresh]})).status_code == 200
        for filters in ([], [{"field": "region", "eq": "华北"}]):
            request = {"query": "氨氯地平", "mode": "dense", "filters": filters, "fields": ["text"]}
            hits = (await client.post("/v1/search", json=request)).json()["results"][0]["hits"]
            assert hits[0]["text"] == fresh["text"]
            assert len({hit["id"] for hit in hits}) == len(hits) == (1 if filters else 8)
        assert outside.server.asked["GET exists"] == opened, "a change of documents does not reopen the version"


async def test_a_version_that_is_only_on_disk_is_refused(outside: Outside) -> None:
    Collection(outside.built.root).publish(outside.built.versions["b"])  # published without the database
    with pytest.raises(BadCollection, match="not in the vector database"):
        async with running(outside.settings()):
            pass


async def test_an_unreachable_database_is_reported_at_once_and_used_again_when_back(outside: Outside) -> None:
    async with running(outside.settings()) as client:
        assert (await client.get("/readyz")).status_code == 200
        outside.server.away = True
        for _ in range(FAILURES_TO_OPEN + 1):
            answer = await client.post("/v1/search", json={"query": "高血压"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "database_away"
            assert int(answer.headers["retry-after"]) >= 1
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).status_code == 200
        assert (await client.post("/v1/search", json={"query": "高血压", "mode": "lexical"})).status_code == 200
        outside.server.away = False
        async with asyncio.timeout(WAIT_SECONDS):
            while (await client.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)
        assert (await client.post("/v1/search", json={"query": "高血压"})).status_code == 200


async def test_a_swap_is_retried_if_the_database_was_unreachable(outside: Outside) -> None:
    outside.publish("b")
    outside.publish("a")
    attempts = 0

    def refuse(method: str, path: str) -> int | None:
        nonlocal attempts
        if outside.built.versions["b"] not in path or not path.endswith("batch"):
            return None
        attempts += 1
        return 500 if attempts <= 2 else None

    outside.server.refuse = refuse
    async with running(outside.settings(reload_seconds=0.02)) as client:
        outside.publish("b")
        async with asyncio.timeout(WAIT_SECONDS):
            while (await client.get("/v1/search?q=高血压")).json().get("snapshot") != outside.built.versions["b"]:
                await asyncio.sleep(0.02)
    assert attempts > 2


async def test_a_service_does_not_start_without_its_database(built: Built, tmp_path: Path) -> None:
    own = copy_collection(built, tmp_path / "collection")
    with pytest.raises(DatabaseAway):
        async with running(make_settings(own, vectors="qdrant+http://127.0.0.1:1/care")):
            pass
