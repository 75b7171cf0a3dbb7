"""API keys on every route: scopes, headers, reload, limits and the audit log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from hmac import compare_digest
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Mount, Route

import service.keys
from service.errors import BadSettings, NotFound
from service.http import middleware
from service.http.app import create_app
from service.http.middleware import PATHS, PUBLIC, scope_of
from service.limits import Scope
from service.settings import Settings
from tests.api.support import AS_ADMIN, TOKEN, Built, client_of, copy_collection, make_settings
from tests.support.keys import bearer, create, revoke
from tests.support.language_model import language_model

pytestmark = pytest.mark.anyio

BODIES: dict[str, Any] = {
    "/v1/search": {"query": "高血压"},
    "/v1/embeddings": {"input": "高血压"},
    "/v1/rerank": {"query": "高血压", "documents": ["头痛"]},
    "/v1/documents": {"documents": [{"id": "new", "text": "新的"}]},
}
NOTICE = {"documents": [{"id": "notice", "text": "今日门诊停诊。"}]}


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Every method and path that the application answers, from its OpenAPI document and from routes outside it."""
    for path, methods in app.openapi()["paths"].items():
        yield from ((method.upper(), path) for method in methods)
    for route in app.routes:
        if isinstance(route, Route):
            yield from ((method, route.path) for method in route.methods or ())
        elif isinstance(route, Mount):
            yield "GET", f"{route.path}/file"


APP = create_app(Settings())
ROUTES = sorted(set(routes(APP)))


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[FastAPI]:
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        yield app


async def send(app: FastAPI, method: str, path: str, headers: Mapping[str, str]) -> httpx.Response:
    path = path.replace("{id}", "a-2" if method == "DELETE" else "a-1").replace("{model}", "care-small-zh")
    async with client_of(app, headers) as client:
        query = "?q=a" if path == "/v1/search" and method != "POST" else ""
        return await client.request(method, path + query, json=BODIES.get(path) if method == "POST" else None)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_has_a_scope(method: str, path: str) -> None:
    """Fails for a new route without an entry in PATHS, which would be answered 404."""
    assert scope_of(method, path) in (PUBLIC, *Scope)


def test_routes_that_change_something_need_more_than_the_search_scope() -> None:
    changing = {(method, path) for method, path in ROUTES if scope_of(method, path) in (Scope.WRITE, Scope.ADMIN)}
    assert changing == {
        ("POST", "/v1/documents"),
        ("DELETE", "/v1/documents/{id}"),
        ("POST", "/admin/reload"),
        ("POST", "/admin/rollback"),
        ("GET", "/admin/versions"),
        ("GET", "/metrics"),
    }
    public = {path for method, path in ROUTES if scope_of(method, path) is PUBLIC}
    assert public == {"/", "/docs", "/openapi.json", "/livez", "/readyz", "/static/file", "/static-offline-docs/file"}


@pytest.mark.parametrize(
    "path", ["//admin/reload", "/v1", "/v1/", "/v2/search", "/Admin/reload", "/adminx", "", "/v1//search"]
)
def test_a_path_without_a_route_has_no_scope(path: str) -> None:
    with pytest.raises(NotFound):
        scope_of("GET", path)


def test_every_entry_of_the_scope_table_has_a_route() -> None:
    paths = [path for _, path in ROUTES]
    assert [known for known in PATHS if not any(path == known or path.startswith(f"{known}/") for path in paths)] == []


@pytest.fixture(scope="module")
def own(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return copy_collection(built, tmp_path_factory.mktemp("access") / "collection")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Scope, str]]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, {scope: create(path, scope, "--scope", scope) for scope in Scope}


@pytest.fixture(scope="module")
async def guarded(own: Built, keys: tuple[Path, dict[Scope, str]]) -> AsyncIterator[FastAPI]:
    async with running(make_settings(own, threads=1, reload_seconds=0, keys_file=keys[0], admin_token=None)) as app:
        yield app


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_accepts_only_keys_of_its_scope(
    method: str, path: str, guarded: FastAPI, keys: tuple[Path, dict[Scope, str]]
) -> None:
    needed = scope_of(method, path)
    without_key = await send(guarded, method, path, {})
    with_wrong_key = await send(guarded, method, path, bearer(f"care_{'0' * 12}_{'x' * 43}"))
    if needed is PUBLIC:
        assert without_key.status_code == with_wrong_key.status_code == (404 if path.endswith("/file") else 200)
        return
    for refused in (without_key, with_wrong_key):
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        if method != "HEAD":
            assert refused.json()["error"]["code"] == "unauthorized"
    for scope, key in keys[1].items():
        for headers in (bearer(key), {"api-key": key}):
            answer = await send(guarded, method, path, headers)
            # 409: no version to roll back to.
            assert answer.status_code in ({200, 409} if scope is needed else {403}), (scope, answer.text)


async def test_the_admin_token_has_every_scope_beside_the_keys_file(
    own: Built, keys: tuple[Path, dict[Scope, str]]
) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0, keys_file=keys[0])) as app:
        for path in ("/v1/search", "/admin/versions", "/metrics", "/v1/collection"):
            assert (await send(app, "GET", path, {})).status_code == 401
            assert (await send(app, "GET", path, AS_ADMIN)).status_code == 200
            assert (await send(app, "GET", path, {"api-key": TOKEN})).status_code == 200


async def test_without_a_keys_file_searching_needs_no_key(own: Built) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0)) as app:
        for headers in ({}, bearer("anything"), {"api-key": "x"}):
            for path in ("/v1/search", "/v1/collection", "/metrics", "/v1/documents/{id}"):
                assert (await send(app, "GET", path, headers)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "bearer {key}"}, 200),
        ({"Authorization": "Bearer   {key}"}, 200),
        ({"Authorization": "Basic eDp5", "api-key": "{key}"}, 200),
        ({"Authorization": "Bearer wrong", "api-key": "{key}"}, 401),
        ({"Authorization": "{key}"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"X-Api-Key": "{key}"}, 401),
    ],
)
async def test_a_key_is_accepted_in_either_header(
    headers: dict[str, str], status: int, guarded: FastAPI, keys: tuple[Path, dict[Scope, str]]
) -> None:
    sent = {name: value.format(key=keys[1][Scope.SEARCH]) for name, value in headers.items()}
    assert (await send(guarded, "GET", "/v1/search", sent)).status_code == status


async def test_a_known_key_id_with_another_secret_is_refused(
    guarded: FastAPI, keys: tuple[Path, dict[Scope, str]]
) -> None:
    key = keys[1][Scope.SEARCH]
    wrong = f"{key[:-1]}{'A' if key[-1] != 'A' else 'B'}"
    for each, status in ((key, 200), (wrong, 401), (key[:-1], 401), (f"{key}A", 401), (key, 200)):
        assert (await send(guarded, "GET", "/v1/search", bearer(each))).status_code == status


async def test_a_known_key_is_not_hashed_again_and_is_compared_in_constant_time(
    guarded: FastAPI, keys: tuple[Path, dict[Scope, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, compared, real = keys[1][Scope.SEARCH], [], compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return real(one, other)

    assert (await send(guarded, "GET", "/v1/search", bearer(key))).status_code == 200
    monkeypatch.setattr(middleware, "compare_digest", compare)
    monkeypatch.delattr(service.keys, "sha256")
    assert (await send(guarded, "GET", "/v1/search", bearer(key))).status_code == 200
    assert compared == [key.encode()]


async def test_keys_are_added_and_removed_with_the_file(own: Built, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = create(path, "first", "--scope", "search")
    async with running(make_settings(own, threads=1, reload_seconds=0.01, keys_file=path)) as app:

        async def until(key: str, status: int) -> None:
            async with asyncio.timeout(60):
                while (await send(app, "GET", "/v1/search", bearer(key))).status_code != status:
                    await asyncio.sleep(0.01)

        assert (await send(app, "GET", "/v1/search", bearer(first))).status_code == 200
        second = create(path, "second", "--scope", "search")
        await until(second, 200)
        revoke(path, "first")
        await until(first, 401)
        assert (await send(app, "GET", "/v1/search", bearer(second))).status_code == 200


async def test_each_key_has_its_own_rate_and_gets_retry_after(own: Built, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    slow = create(path, "slow", "--scope", "search", "--rate", "3/d")
    other = create(path, "other", "--scope", "search", "--rate", "3/d")
    async with running(make_settings(own, threads=1, reload_seconds=0, keys_file=path)) as app:
        statuses = [(await send(app, "GET", "/v1/search", bearer(slow))).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        refused = await send(app, "POST", "/v1/embeddings", bearer(slow))
        assert refused.json()["error"]["code"] == "rate_limited"
        assert 86_400 / 3 - 60 < int(refused.headers["retry-after"]) <= 86_400 / 3
        assert (await send(app, "GET", "/v1/search", bearer(other))).status_code == 200


async def test_a_budget_counts_calls_of_the_language_model_but_not_cached_answers(own: Built, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = create(path, "a", "--scope", "search", "--model-calls", "5/d")
    with language_model() as model:
        hyde_settings = {"hyde_url": model.url, "hyde_model": "m", "hyde_timeout_ms": 20_000, "lru_mb": 8}
        settings = make_settings(own, threads=1, reload_seconds=0, keys_file=path, **hyde_settings)
        async with running(settings) as app, client_of(app, bearer(key)) as client:

            async def hyde(query: str, documents: int) -> httpx.Response:
                return await client.post("/v1/search", json={"query": query, "hyde": {"documents": documents}})

            never = await hyde("高血压", 6)
            assert (never.status_code, "retry-after" in never.headers) == (422, False), "waiting would not help"
            assert (await hyde("高血压", 3)).json()["results"][0]["hyde"] == "used"
            assert (await hyde("高血压", 3)).status_code == 200, "from the cache"
            refused = await hyde("糖尿病", 3)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
            assert (await hyde("糖尿病", 2)).status_code == 200
            assert (await client.post("/v1/search", json={"query": "糖尿病"})).status_code == 200
            assert len(model.requests) == 5


async def test_changes_admin_calls_and_refusals_are_audited_without_texts(own: Built, tmp_path: Path) -> None:
    path, log = tmp_path / "keys.json", tmp_path / "audit.jsonl"
    writer = create(path, "writer", "--scope", "search", "--scope", "write")
    keeper = create(path, "keeper", "--scope", "admin")
    async with running(make_settings(own, threads=1, reload_seconds=0, keys_file=path, audit_log=log)) as app:
        async with client_of(app, bearer(writer) | {"x-request-id": "r-1"}) as client:
            await client.post("/v1/documents", json=NOTICE)
            await client.delete("/v1/documents/notice")
            await client.get("/v1/search?q=高血压")
            await client.post("/admin/rollback?version=none")
        async with client_of(app, bearer(keeper)) as client:
            await client.post("/admin/rollback?version=none")
            await client.get("/admin/versions")
            await client.get("/metrics")
        await send(app, "POST", "/v1/documents", bearer("unknown"))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["key"], line["act"], line["status"]) for line in lines] == [
        ("writer", "POST /v1/documents", 200),
        ("writer", "DELETE /v1/documents/{id:path}", 200),
        ("writer", "POST /admin", 403),
        ("keeper", "POST /admin/rollback", 409),
        (None, "POST /v1/documents", 401),
    ]
    act = {"key": "writer", "act": "POST /v1/documents", "status": 200, "request_id": "r-1"}
    assert lines[0] == {"time": lines[0]["time"], **act, "documents": 1, "ids": ["notice"]}
    assert (lines[1]["ids"], lines[3]["version"]) == (["notice"], "none")
    assert "停诊" not in log.read_text()
    assert log.stat().st_mode & 0o077 == 0


async def test_a_tenant_cannot_post_a_document_that_another_tenant_finds(own: Built, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    one, other = (create(path, name, "--scope", "write", "--filter", f"tenant={name}") for name in ("a", "b"))
    async with running(make_settings(own, threads=1, reload_seconds=0, keys_file=path)) as app:

        async def post(key: str, **metadata: object) -> int:
            body = {"documents": [{"id": "n", "text": "停诊。", "metadata": metadata}]}
            async with client_of(app, bearer(key)) as client:
                return (await client.post("/v1/documents", json=body)).status_code

        assert await post(one, tenant=["a", "b"]) == 422, "tenant b would find it"
        assert await post(other, tenant=["a"]) == 422
        assert await post(one) == 422
        assert await post(one, tenant=["a", "a"], kind=["x", "y"]) == 200
        assert await post(one, tenant="a") == 200


async def test_limits_of_the_collection_reveal_nothing_of_other_tenants(own: Built, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    field = {"tenant": "clinic"}
    key = create(path, "clinic", "--scope", "search", "--scope", "write", "--filter", "tenant=clinic")
    settings = make_settings(own, threads=1, reload_seconds=0, keys_file=path, max_stream_bytes=1024)
    async with running(settings) as app, client_of(app) as admin, client_of(app, bearer(key)) as client:
        many = {"tenant": "other"} | {f"secret{number}": "x" for number in range(190)}
        await admin.post("/v1/documents", json={"documents": [{"id": "other-1", "text": "头痛", "metadata": many}]})
        mine = {"id": "clinic-1", "text": "头痛" * 200, "metadata": field | {"ward": "west"}}
        assert (await client.post("/v1/documents", json={"documents": [mine]})).status_code == 200
        more = field | {f"own{number}": "x" for number in range(20)}
        full = await client.post("/v1/documents", json={"documents": [mine | {"metadata": more}]})
        assert (full.status_code, full.json()["error"]["field"]) == (422, "documents")
        assert "the collection has more than 200 metadata fields" in full.json()["error"]["message"]
        for filters in ([{"field": "absent", "eq": 1}], [{"field": "secret1", "eq": 1}]):
            refused = await client.post("/v1/search", json={"query": "头痛", "filters": filters})
            assert "it has tenant, ward" in refused.json()["error"]["message"]
        lines = {"query": ["头痛"], "fields": ["text"]}
        long = await client.post("/v1/search", json=lines, headers={"accept": "application/x-ndjson"})
        assert (long.status_code, "CARE_MAX_STREAM_BYTES" in long.text) == (422, True)


async def test_the_access_log_names_the_key(own: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "keys.json"
    key = create(path, "website", "--scope", "search")
    async with running(make_settings(own, threads=1, reload_seconds=0, keys_file=path, access_log=True)) as app:
        await send(app, "GET", "/v1/search", bearer(key))
        await send(app, "GET", "/metrics", bearer(key))
        await send(app, "GET", "/v1/search", {})
        await send(app, "GET", "/livez", bearer(key))
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "service.access"]
    assert [line.get("key") for line in lines] == ["website", "website", None, None]
    assert key not in caplog.text


async def test_head_is_answered_like_get_on_health_and_metrics_routes(
    guarded: FastAPI, keys: tuple[Path, dict[Scope, str]]
) -> None:
    for path in ("/livez", "/readyz"):
        assert (await send(guarded, "HEAD", path, {})).status_code == 200
    assert (await send(guarded, "HEAD", "/metrics", {})).status_code == 401
    assert (await send(guarded, "HEAD", "/metrics", bearer(keys[1][Scope.SEARCH]))).status_code == 403
    assert (await send(guarded, "HEAD", "/metrics", bearer(keys[1][Scope.ADMIN]))).status_code == 200


async def test_a_full_disk_does_not_stop_the_service(own: Built, caplog: pytest.LogCaptureFixture) -> None:
    async with running(make_settings(own, threads=1, reload_seconds=0, audit_log=Path("/dev/full"))) as app:
        assert (await send(app, "POST", "/admin/reload", AS_ADMIN)).status_code == 200
    assert "the audit log /dev/full lacks the act of request" in caplog.text


def test_openapi_names_scope_and_errors_of_every_route_that_takes_a_key() -> None:
    schema = APP.openapi()
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "api_key"}
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            scope = scope_of(method.upper(), path)
            assert route.get("x-scope") == scope
            assert ("security" in route) == ({"401", "403", "429"} <= set(route["responses"])) == (scope is not None)


def test_the_service_does_not_start_if_the_audit_log_cannot_be_written(built: Built, tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match=r"CARE_AUDIT_LOG: .* cannot be written"):
        create_app(make_settings(built, audit_log=tmp_path / "none" / "audit.jsonl"))
