"""deploy/haproxy.cfg in front of a real service: forwards requests, and refuses a flood with the usual error shape."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import httpx
import pytest

from loadtest.lab.overload import proxy
from service.engine.local import InProcessEngine
from tests.api.gate import Gate
from tests.api.live import live
from tests.api.support import Built, make_settings

WAIT_SECONDS = 60.0
CLIENTS = 8


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(InProcessEngine, "run", lambda engine, serving, batch: gate.run(engine, serving, batch))
    return gate


@pytest.fixture
def client(built: Built, gate: Gate) -> Iterator[httpx.Client]:
    """Yields a client of the proxy, which admits two searches at a time."""
    with (
        live(make_settings(built, threads=1, reload_seconds=0)) as service,
        proxy(service, in_flight=2) as url,
        httpx.Client(base_url=url, timeout=WAIT_SECONDS) as client,
    ):
        yield client


def test_requests_are_forwarded(client: httpx.Client) -> None:
    answer = client.get("/v1/search", params={"q": "高血压"}, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    assert answer.json()["results"][0]["hits"]
    assert client.post("/v1/search", json={"query": ""}).status_code == 422


@pytest.mark.parametrize("path", ["/metrics", "/admin/versions", "/%61dmin/versions", "/metrics/", "/admin"])
def test_routes_for_operators_are_not_forwarded(client: httpx.Client, path: str) -> None:
    answer = client.get(path, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json()["error"]["request_id"]) == (404, "mine")
    assert answer.json()["error"]["code"] == "not_found"
    assert "x-content-type-options" not in answer.headers  # the service's own 404 has it


def test_a_flood_is_refused_by_the_proxy_and_health_is_still_answered(client: httpx.Client, gate: Gate) -> None:
    gate.open.clear()
    with ThreadPoolExecutor(CLIENTS) as pool:
        try:
            # The gate blocks every admitted search, so only refusals are answered.
            asked = [
                pool.submit(client.get, "/v1/search", params={"q": f"query {number}"}) for number in range(CLIENTS)
            ]
            refused = next(as_completed(asked, timeout=WAIT_SECONDS)).result()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            error = refused.json()["error"]
            assert error["code"] == "overloaded"
            assert error["request_id"]
            odd = client.get("/v1/search", params={"q": "c"}, headers={"X-Request-Id": 'a"b'})
            assert odd.json()["error"]["request_id"] == 'a"b'
            assert client.get("/livez").status_code == 200
        finally:
            gate.open.set()
        statuses = [one.result().status_code for one in asked]
    assert statuses.count(200) >= 2
    assert set(statuses) == {200, 429}
    assert client.get("/v1/search", params={"q": "c"}).status_code == 200
