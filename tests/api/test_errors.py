"""Answers to bad requests: the status, and a body of one fixed shape that names what is wrong."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.http.app import create_app
from tests.api.support import Built, client_of, make_settings

pytestmark = pytest.mark.anyio


def check(response: httpx.Response, status: int, code: str, field: str | None = None) -> str:
    """Checks the error's shape; returns its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert list(response.json()) == ["error"]
    assert set(error) == {"code", "message", "request_id"} | ({"field"} if field else set())
    assert error["code"] == code
    assert error.get("field") == field
    assert error["request_id"] == response.headers["x-request-id"]
    assert "\n" not in error["message"]
    return error["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "query"),
        ({"query": ""}, "query"),
        ({"query": " \t\n\u3000"}, "query"),
        ({"query": []}, "query"),
        ({"query": ["好", ""]}, "query"),
        ({"query": ["好", 3]}, "query"),
        ({"query": 3}, "query"),
        ({"query": None}, "query"),
        ({"query": ["好"] * 17}, "query"),
        ({"query": "好", "top_k": 0}, "top_k"),
        ({"query": "好", "top_k": 101}, "top_k"),
        ({"query": "好", "top_k": -1}, "top_k"),
        ({"query": "好", "top_k": 10**30}, "top_k"),
        ({"query": "好", "top_k": "10"}, "top_k"),
        ({"query": "好", "top_k": 2.5}, "top_k"),
        ({"query": "好", "top_k": True}, "top_k"),
        ({"query": "好", "offset": -1}, "offset"),
        ({"query": "好", "offset": 91}, "offset"),
        ({"query": "好", "offset": "5"}, "offset"),
        ({"query": "好", "facets": ["colour"]}, "facets"),
        ({"query": "好", "facets": "kind"}, "facets"),
        ({"query": "好", "facets": ["kind"] * 17}, "facets"),
        ({"query": "好", "mode": "best"}, "mode"),
        ({"query": "好", "fusion": "sum"}, "fusion"),
        ({"query": "好", "weight": 1.5}, "weight"),
        ({"query": "好", "fields": ["secret"]}, "fields"),
        ({"query": "好", "min_score": "0.5"}, "min_score"),
        ({"query": "好", "passages": -1}, "passages"),
        ({"query": "好", "passages": 21}, "passages"),
        ({"query": "好", "explain": 1}, "explain"),
        ({"query": "好", "timeout_ms": 0}, "timeout_ms"),
        ({"query": "好", "timeout_ms": 600_001}, "timeout_ms"),
        ({"query": "好", "bulk": "yes"}, "bulk"),
        ({"query": "好", "cache": None}, "cache"),
        ({"query": "好", "hyde": "yes"}, "hyde"),
        ({"query": "好", "hyde": {"documents": 0}}, "hyde"),
        ({"query": "好", "hyde": {"documents": 9}}, "hyde"),
        ({"query": "好", "hyde": {"papers": 2}}, "hyde"),
        ({"query": "好", "hyde": True}, "hyde"),
        ({"query": "好", "colour": "red"}, "colour"),
        ({"query": "好", "filters": [{"field": "colour", "eq": "red"}]}, "filters"),
        ({"query": "好", "filters": [{"field": "kind"}]}, "filters"),
        ({"query": "好", "filters": [{"field": "kind", "eq": "a", "in": ["b"]}]}, "filters"),
        ({"query": "好", "filters": [{"field": "kind", "in": []}]}, "filters"),
        ({"query": "好", "filters": [{"field": "kind", "like": "a"}]}, "filters"),
        ({"query": "好", "filters": [{"field": "year", "eq": "tomorrow"}]}, "filters"),
        ({"query": "好", "filters": [{"field": "year", "gte": True}]}, "filters"),
        ({"query": "好", "filters": [{"field": "year", "gte": 10**400}]}, "filters"),
        ({"query": "好", "filters": [{"field": "kind", "eq": 1}]}, "filters"),
        ({"query": "好", "filters": "kind"}, "filters"),
    ],
)
async def test_a_wrong_field_is_named(client: httpx.AsyncClient, body: dict[str, Any], field: str) -> None:
    message = check(await client.post("/v1/search", json=body), 422, "invalid_request", field)
    assert message.startswith((f"{field}: ", f"{field}[", f"{field}.", "filter on "))
    if field == "filters":
        assert "for example " in message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"not json", "body"),
        (b"[]", "body"),
        (b'"query"', "body"),
        (b'{"query": "a"', "body"),
        ('{"query": "高血压"}'.encode("gb18030"), "body"),
        (b'{"query": "\xff\xfe"}', "body"),
        (b'{"query": "\\ud800"}', "body"),
        (b'{"query": "a", "weight": NaN}', "weight"),
        (b'{"query": "a", "min_score": Infinity}', "min_score"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(client: httpx.AsyncClient, body: bytes, field: str) -> None:
    check(await client.post("/v1/search", content=body), 422, "invalid_request", field)


@pytest.mark.parametrize("length", [1, 2000])
async def test_a_body_in_another_encoding_is_named(client: httpx.AsyncClient, length: int) -> None:
    text = f'{{"query": "{"高血压" * length}"}}'
    for body in (text.encode("gb18030"), text.encode("utf-16")):
        message = check(await client.post("/v1/search", content=body), 422, "invalid_request", "body")
        assert message == "body: is not UTF-8; convert it"
    assert (await client.post("/v1/search", content=text.encode("utf-8-sig"))).status_code == 200


async def test_a_post_refuses_what_its_url_asks_for(client: httpx.AsyncClient) -> None:
    """curl turns a GET into a POST as soon as it gets a body: filters in the URL must not be lost."""
    answer = await client.post("/v1/search?top_k=1&filter=kind:eq:drug", json={"query": "药"})
    assert "move what is behind the ? of the URL there" in check(answer, 422, "invalid_request", "body")


async def test_errors_of_a_query_string_name_its_own_parameters(client: httpx.AsyncClient) -> None:
    for query_string, field, message in (
        ("", "query", "give a text as q=…"),
        ("query=a", "query", "no such parameter"),
        ("q=a&filters=x", "filters", "no such parameter; did you mean filter?"),
        ("q=a&topk=3", "topk", "no such parameter; did you mean top_k?"),
        ("q=a&zzz=3", "zzz", "no such parameter; there are q, filter, top_k, "),
    ):
        assert message in check(await client.get(f"/v1/search?{query_string}"), 422, "invalid_request", field)
    answer = await client.get("/v1/search?q=头痛&fields=&facets=&top_k=1")
    assert [list(hit) for hit in answer.json()["results"][0]["hits"]] == [["score", "id"]]


@pytest.mark.parametrize(
    ("query_string", "field"),
    [
        ("", "query"),
        ("q=", "query"),
        ("q=%20", "query"),
        ("q=%ff%fe", "query"),
        ("q=%B8%DF", "query"),
        ("query=a", "query"),
        ("q=a&top_k=0", "top_k"),
        ("q=a&top_k=ten", "top_k"),
        ("q=a&top_k=1&top_k=2", "top_k"),
        ("q=a&offset=ten", "offset"),
        ("q=a&offset=50&top_k=51", "offset"),
        ("q=a&facets=colour", "facets"),
        ("q=a&mode=best", "mode"),
        ("q=a&colour=red", "colour"),
        ("q=a&filter=kind", "filters"),
        ("q=a&filter=kind:like:x", "filters"),
        ("q=a&filter=colour:eq:red", "filters"),
        ("q=a&fields=secret", "fields"),
        ("q=a&min_score=nan", "min_score"),
        ("q=a&passages=many", "passages"),
        ("q=a&explain=perhaps", "explain"),
        ("q=a&timeout_ms=-1", "timeout_ms"),
        ("q=a&hyde=true", "hyde"),
        ("q=a" + "&q=a" * 1000, "query"),
    ],
)
async def test_a_wrong_query_string_is_named(client: httpx.AsyncClient, query_string: str, field: str) -> None:
    check(await client.get(f"/v1/search?{query_string}"), 422, "invalid_request", field)


@pytest.mark.parametrize("query", ["\u200b", "\x00", " \t\u3000\ufeff", "\x01\u200d"])
async def test_a_query_of_invisible_characters_counts_as_empty(client: httpx.AsyncClient, query: str) -> None:
    check(await client.post("/v1/search", json={"query": query}), 422, "invalid_request", "query")


@pytest.mark.parametrize("path", ["/static/app.js", "/"])
@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=abc", "lines=1-2"])
async def test_an_unusable_range_header_is_answered_with_the_whole_file(
    client: httpx.AsyncClient, path: str, asked: str
) -> None:
    whole = await client.get(path)
    part = await client.get(path, headers={"Range": asked})
    assert (part.status_code, part.content) == (200, whole.content)


async def test_unknown_paths_and_methods_give_errors_of_the_same_shape(client: httpx.AsyncClient) -> None:
    check(await client.get("/v2/search"), 404, "not_found")
    check(await client.get("/static/nothing.js"), 404, "not_found")
    check(await client.get("/v1/documents/nobody"), 404, "not_found")
    refused = await client.delete("/v1/search")
    check(refused, 405, "method_not_allowed")
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
    reload = await client.get("/admin/reload")
    check(reload, 405, "method_not_allowed")
    assert reload.headers["allow"] == "POST"
    document = await client.put("/v1/documents/a-1")
    check(document, 405, "method_not_allowed")
    assert document.headers["allow"] == "DELETE, GET"


async def test_a_body_beyond_the_limit_is_refused_with_and_without_a_length(client: httpx.AsyncClient) -> None:
    check(await client.post("/v1/search", content=b"x" * (2 * 1024 * 1024 + 1)), 413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(33):
            yield b"x" * 65536

    check(await client.post("/v1/search", content=chunks()), 413, "body_too_large")


async def test_a_valid_request_id_is_kept_and_any_other_is_replaced(client: httpx.AsyncClient) -> None:
    kept = await client.get("/livez", headers={"X-Request-Id": "order-66.a_b:c"})
    assert kept.headers["x-request-id"] == "order-66.a_b:c"
    for strange in ("a b", "x" * 65, "<b>", ""):
        response = await client.get("/v2", headers={"X-Request-Id": strange})
        made = response.headers["x-request-id"]
        assert made != strange
        assert response.json()["error"]["request_id"] == made


class Broken:
    """A searcher that fails with a message that must stay private."""

    async def search(self, serving: object, request: object) -> None:
        raise RuntimeError("secret: patient 4711 asked about …")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.search.searcher.Searcher.search", Broken.search)


@pytest.mark.usefixtures("broken")
async def test_nothing_of_an_unknown_exception_reaches_the_client(
    built: Built, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(make_settings(built, threads=1, reload_seconds=0))
    async with app.router.lifespan_context(app), client_of(app) as client:
        response = await client.post("/v1/search", json={"query": "a"}, headers={"X-Request-Id": "r-1"})
        message = check(response, 500, "internal")
        assert "4711" not in message
        assert any("r-1" in record.getMessage() for record in caplog.records)
        assert 'care_requests_total{route="/v1/search",status="500"} 1.0' in (await client.get("/metrics")).text


async def test_a_compressed_body_is_refused_with_the_reason(client: httpx.AsyncClient) -> None:
    packed = gzip.compress(b'{"query": "a"}')
    for path in ("/v1/search", "/v1/embeddings", "/v1/documents"):
        response = await client.post(path, content=packed, headers={"Content-Encoding": "gzip"})
        assert "without the header Content-Encoding" in check(response, 422, "invalid_request", "body")
        response = await client.post(path, content=packed)
        assert check(response, 422, "invalid_request", "body").endswith("is not read here; send it plain")
    plain = await client.post("/v1/search", content=b'{"query": "a"}', headers={"Content-Encoding": "identity"})
    assert plain.status_code == 200
