"""The routes besides search: documents, collection, health, docs, page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import httpx
import pytest

from models.encoder.spec import EncoderSpec
from service.settings import Settings
from tests.api.support import ENCODER, ENTRIES, Built, copy_collection, make_settings, running

pytestmark = pytest.mark.anyio


async def test_get_returns_the_whole_document(client: httpx.AsyncClient, built: Built) -> None:
    response = await client.get("/v1/documents/a-6")
    assert response.json() == {
        "id": "a-6",
        "title": "头痛",
        "metadata": {"kind": "disease", "year": 2021},
        "text": ENTRIES[5]["text"],
        "snapshot": built.versions["a"],
    }


async def test_an_id_may_look_like_a_path(client: httpx.AsyncClient) -> None:
    for strange in ("a/b", "..%2f..%2fetc", "%00", "a-6%20"):
        assert (await client.get(f"/v1/documents/{strange}")).json()["error"]["code"] == "not_found"


async def test_the_collection_lists_the_fields_for_filters(client: httpx.AsyncClient, built: Built) -> None:
    collection = (await client.get("/v1/collection")).json()
    assert collection["snapshot"] == built.versions["a"]
    assert collection["documents"] == len(ENTRIES)
    assert collection["passages"] > len(ENTRIES)
    assert collection["facets"]["kind"] == {"disease": 3, "drug": 2, "first-aid": 2, "test": 1}
    assert collection["fields"] == ["kind", "year"]
    assert collection["modes"] == ["dense", "lexical", "hybrid"]
    assert collection["encoder"]["dim"] == 512
    assert collection["max_queries"] == 16


async def test_livez_and_readyz_are_different_checks(client: httpx.AsyncClient, built: Built) -> None:
    assert (await client.get("/livez")).json()["status"] == "alive"
    ready = await client.get("/readyz")
    assert ready.json() == {"status": "ready", "snapshot": built.versions["a"]}


async def test_without_a_snapshot_the_service_is_alive_but_not_ready(tmp_path: Path) -> None:
    settings = Settings(collection=tmp_path / "empty", encoder=ENCODER, threads=1, reload_seconds=0)
    async with running(settings) as client:
        assert (await client.get("/livez")).status_code == 200
        for path in ("/readyz", "/v1/collection", "/v1/documents/x", "/v1/search?q=a"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "not_ready"
            assert "care index build" in response.json()["error"]["message"]
            assert response.headers["retry-after"] == "1"


async def test_a_service_whose_queries_fail_is_not_ready(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    async with running(make_settings(copy_collection(built, tmp_path / "c"), threads=1)) as client:
        assert (await client.get("/readyz")).status_code == 200
        monkeypatch.setattr("service.engine.local.InProcessEngine.run", broken)
        response = await client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_failed"
        assert (await client.get("/livez")).status_code == 200
        monkeypatch.undo()
        assert (await client.get("/readyz")).status_code == 200
    assert "the device is gone" in caplog.text


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_run_only_their_own_files_and_cannot_be_framed(client: httpx.AsyncClient, path: str) -> None:
    page = await client.get(path)
    policy = page.headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"):
        assert part in policy.split("; ")
    assert "unsafe" not in policy
    assert not re.search(r"<style|<script(?![^>]*src=)|\son\w+=|style=", page.text)


async def test_docs_describe_the_routes_outside_fastapi_and_work_offline(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert "swagger" in page.text
    assert "://" not in page.text.replace("http://www.w3.org", "")
    schema = (await client.get("/openapi.json")).json()
    search = schema["paths"]["/v1/search"]
    body = search["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/SearchRequest"}
    in_body = set(schema["components"]["schemas"]["SearchRequest"]["properties"])
    in_url = {parameter["name"] for parameter in search["get"]["parameters"]}
    assert in_url - in_body == {"q", "filter"}
    assert in_body - in_url == {"query", "filters"}
    assert schema["components"]["schemas"]["SearchRequest"]["properties"]["top_k"]["maximum"] == 100
    assert {"200", "401", "403", "408", "413", "422", "429", "503", "504"} == set(search["post"]["responses"])
    assert set(search["post"]["responses"]["200"]["content"]) == {"application/json", "application/x-ndjson"}
    for path in ("/v1/embeddings", "/v1/rerank"):
        assert {"404", "422", "429"} < set(schema["paths"][path]["post"]["responses"])
    for path in ("/v1/documents/{id}", "/v1/collection", "/admin/reload", "/livez", "/readyz", "/metrics"):
        assert path in schema["paths"]
    assert _dangling(schema) == []


@pytest.mark.parametrize("path", ["/v1/search", "/v1/embeddings", "/v1/rerank"])
async def test_the_examples_of_the_docs_are_requests_that_work(client: httpx.AsyncClient, path: str) -> None:
    schema = (await client.get("/openapi.json")).json()
    examples = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
    for name, example in examples.items():
        response = await client.post(path, json=example["value"])
        # The collection of the tests has no departments and no dates; the example corpus has.
        assert response.status_code == (422 if name in ("filters", "not and any") else 200), response.text


async def test_the_page_and_its_files_are_served(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    script = await client.get("/static/app.js")
    assert "javascript" in script.headers["content-type"]


async def test_metrics_count_by_template_and_name_the_snapshot(client: httpx.AsyncClient, built: Built) -> None:
    await client.get("/v1/documents/a-1")
    await client.post("/v1/search", json={"query": ["高血压", "发热"]})
    await client.get("/static/app.js")
    await client.get("/wp-login.php")
    text = (await client.get("/metrics")).text
    routes = {
        line.split('route="')[1].split('"')[0] for line in text.splitlines() if line.startswith("care_requests_total")
    }
    assert {"/v1/search", "/v1/documents/{id:path}", "/static", "unmatched"} <= routes
    assert not any("wp-login" in route or "a-1" in route for route in routes)
    assert f'care_snapshot_info{{version="{built.versions["a"]}"}} 1.0' in text
    assert f"care_snapshot_documents {len(ENTRIES)}.0" in text
    for name in ("care_batch_size_count", "care_queue_length 0.0", "care_queries_total", "care_swaps_total 1.0"):
        assert name in text
    for stage in ("tokenize", "queue", "encode", "search", "fetch", "total"):
        assert f'care_stage_seconds_count{{stage="{stage}"}}' in text


def _dangling(schema: dict) -> list[str]:
    """Returns references of an OpenAPI document that point to nothing."""
    known = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                found.append(node["$ref"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(schema)
    return sorted(set(found) - known)


async def test_a_max_length_beyond_the_graph_fails_long_queries_alone(
    built: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(ENCODER, tmp_path / "encoder")
    EncoderSpec.load(folder).model_copy(update={"max_length": 600}).save(folder)  # as somebody wrote by hand
    async with running(make_settings(copy_collection(built, tmp_path / "c"), encoder=folder, threads=1)) as client:
        for query, status in (("糖" * 700, 503), ("糖" * 500, 200)):
            response = await client.post("/v1/search", json={"query": query, "mode": "dense"})
            assert response.status_code == status
    assert "the graph fails on 600 tokens; if max_length in encoder.json was raised to 600" in caplog.text
    assert "Traceback" not in caplog.text
