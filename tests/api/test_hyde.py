"""/v1/search with hypothetical documents (HyDE): formula 8, and the plain search that it falls back to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import numpy as np
import pytest

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import Side
from service.engine.jobs import SearchJob
from tests.api.gate import Gate
from tests.api.support import Built, make_settings, running
from tests.api.test_errors import check
from tests.support.language_model import LanguageModel, choice, language_model

pytestmark = pytest.mark.anyio

QUERY = "血压高怎么办"


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    with language_model() as model:
        yield model


@pytest.fixture
async def client(built: Built, gate: Gate, model: LanguageModel) -> AsyncIterator[httpx.AsyncClient]:
    hyde = {"hyde_url": model.url, "hyde_model": "tiny", "hyde_timeout_ms": 20_000}
    async with running(make_settings(built, threads=1, reload_seconds=0, lru_mb=1, **hyde)) as client:
        yield client


async def result(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post("/v1/search", json={"query": QUERY, "mode": "dense", "top_k": 8} | body)
    assert response.status_code == 200, response.text
    return response.json()["results"][0]


async def test_search_uses_the_mean_of_query_and_documents(
    client: httpx.AsyncClient, model: LanguageModel, gate: Gate, encoder: OnnxEncoder
) -> None:
    texts = ["骨折要用夹板固定。", "怀疑骨折时不要移动。"]
    model.respond = lambda number: (200, choice(texts[number]))
    found = await result(client, hyde={"documents": 2})
    assert found["hyde"] == "used"
    documents = [request["messages"][0]["content"] for request in model.requests]
    assert len(documents) == 2
    (job,) = [job for job in gate.jobs if isinstance(job, SearchJob) and job.query == QUERY]
    assert job.vector is not None
    used = np.frombuffer(job.vector, np.float32)
    query, imagined = encoder.encode([QUERY], Side.QUERY), encoder.encode(texts, Side.DOCUMENT)
    mean = (query.sum(axis=0) + imagined.sum(axis=0)) / 3
    assert float(used @ (mean / np.linalg.norm(mean))) == pytest.approx(1, abs=0.01)
    assert np.linalg.norm(used) == pytest.approx(1, abs=1e-5)
    # Two of three vectors are about fractures.
    assert found["hits"][0]["id"] == "a-5"


async def test_three_documents_are_generated_by_default(client: httpx.AsyncClient, model: LanguageModel) -> None:
    assert (await result(client, hyde=True))["hyde"] == "used"
    assert len(model.requests) == 3
    assert "hyde" not in await result(client, hyde=False)
    assert len(model.requests) == 3


async def test_in_hybrid_mode_lexical_search_uses_the_query_alone(
    client: httpx.AsyncClient, model: LanguageModel
) -> None:
    model.respond = lambda number: (200, choice("骨折要用夹板固定。"))
    plain = await result(client, query="高血压", mode="hybrid", explain=True)
    blended = await result(client, query="高血压", mode="hybrid", explain=True, hyde=True)
    lexical = [{hit["id"]: hit["explain"]["lexical"] for hit in each["hits"]} for each in (plain, blended)]
    dense = [{hit["id"]: hit["explain"]["dense"] for hit in each["hits"]} for each in (plain, blended)]
    assert lexical[0] == lexical[1]
    assert dense[0] != dense[1]


async def test_a_failure_falls_back_to_a_reported_plain_search_that_is_not_cached(
    client: httpx.AsyncClient, model: LanguageModel
) -> None:
    plain = await result(client)
    model.respond = lambda number: (500, b"")
    failed = await result(client, hyde=True)
    assert failed.pop("hyde") == "failed"
    assert failed == plain
    model.respond = lambda number: (200, choice("氨氯地平。"))
    assert (await result(client, hyde=True))["hyde"] == "used"


async def test_hypothetical_documents_are_cached(client: httpx.AsyncClient, model: LanguageModel) -> None:
    first = await result(client, hyde={"documents": 1})
    assert await result(client, hyde={"documents": 1}) == first
    assert len(model.requests) == 1
    await result(client, hyde={"documents": 2})
    assert len(model.requests) == 3


async def test_each_query_of_a_request_falls_back_on_its_own(client: httpx.AsyncClient, model: LanguageModel) -> None:
    def respond(number: int) -> tuple[int, bytes]:
        return (500, b"") if "发热" in model.requests[number]["messages"][0]["content"] else (200, choice("药"))

    model.respond = respond
    body = {"query": ["高血压", "发热", "骨折"], "hyde": {"documents": 1}}
    response = await client.post("/v1/search", json=body)
    assert [each["hyde"] for each in response.json()["results"]] == ["used", "failed", "used"]
    metrics = (await client.get("/metrics")).text
    assert 'care_hyde_total{outcome="used"} 2.0' in metrics
    assert 'care_hyde_total{outcome="failed"} 1.0' in metrics


async def test_a_model_slower_than_the_timeout_is_not_waited_for(built: Built, model: LanguageModel) -> None:
    hyde = {"hyde_url": model.url, "hyde_model": "tiny", "hyde_timeout_ms": 100}
    model.awake.clear()
    async with running(make_settings(built, threads=1, reload_seconds=0, **hyde)) as client:
        assert (await result(client, hyde=True))["hyde"] == "failed"


async def test_a_request_with_a_shorter_timeout_than_the_model_gets_a_plain_search(
    client: httpx.AsyncClient, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.search.searcher.HYDE_SHARE", 0.01)
    plain = await result(client)
    model.awake.clear()
    failed = await result(client, hyde=True, timeout_ms=19_000)
    assert failed.pop("hyde") == "failed"
    assert failed == plain


@pytest.mark.parametrize(
    "body", [{"query": "好", "mode": "lexical"}, {"query": ["好"] * 17}], ids=["no vector", "too many queries"]
)
async def test_hyde_with_unsuitable_options_is_refused(client: httpx.AsyncClient, body: dict) -> None:
    check(await client.post("/v1/search", json=body | {"hyde": True}), 422, "invalid_request", "hyde")


async def test_model_calls_per_request_are_bounded(client: httpx.AsyncClient, model: LanguageModel) -> None:
    """16 queries with 8 documents each would be 128 calls."""
    many = {"query": ["好"] * 16, "mode": "dense", "hyde": {"documents": 8}}
    message = check(await client.post("/v1/search", json=many), 422, "invalid_request", "hyde")
    assert "128 times" in message
    assert "at most 16 together" in message
    assert model.requests == []
    assert (await client.post("/v1/search", json=many | {"query": ["好", "坏"]})).status_code == 200
    assert 0 < len(model.requests) <= 16  # a call that found no connection in time did not arrive


async def test_without_a_model_the_error_names_the_setting(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0)) as client:
        response = await client.post("/v1/search", json={"query": "好", "hyde": True})
    assert "CARE_HYDE_URL and CARE_HYDE_MODEL" in check(response, 422, "invalid_request", "hyde")
