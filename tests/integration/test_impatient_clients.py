"""A few clients that send the next request at once: none is refused, by one process or by several."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.api.support import Built
from tests.integration.processes import WAIT_SECONDS, Service, service

REQUESTS = 12
# The service's default limit instead of the tests' long timeout; on a busy machine every wait exceeds it.
DEFAULT_WAIT = {"CARE_MAX_WAIT_MS": "50"}
DEPLOYMENTS = {
    "one process": {},
    "two workers": {"CARE_WORKERS": "2"},
    "two workers and an engine process": {"CARE_WORKERS": "2", "CARE_ENGINE": "process"},
    "a process cache": {"CARE_LRU_MB": "16"},
}


@pytest.fixture(scope="module", params=DEPLOYMENTS)
def running(request: pytest.FixtureRequest, built: Built) -> Iterator[Service]:
    with service(built, **DEFAULT_WAIT, **DEPLOYMENTS[request.param]) as running:
        yield running


def search_without_pause(address: str, mode: str, texts: list[str]) -> Counter[int]:
    """Returns the statuses of requests on one connection, GET and POST in turn."""
    statuses: Counter[int] = Counter()
    host = address.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=WAIT_SECONDS)) as connection:
        for number, text in enumerate(texts):
            if number % 2:
                connection.request("GET", f"/v1/search?q={quote(text)}&mode={mode}")
            else:
                connection.request("POST", "/v1/search", json.dumps({"query": text, "mode": mode}))
            answer = connection.getresponse()
            answer.read()
            statuses[answer.status] += 1
    return statuses


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "different"])
@pytest.mark.parametrize("clients", [3, 16])
def test_a_few_impatient_clients_are_never_refused(running: Service, clients: int, equal: bool, mode: str) -> None:
    texts = [
        ["高血压吃什么药" if equal else f"{mode} 高血压 {clients} {client} {number}" for number in range(REQUESTS)]
        for client in range(clients)
    ]
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(search_without_pause, running.address, mode, own) for own in texts]
        statuses = sum((one.result() for one in asked), Counter())
    assert statuses == {200: clients * REQUESTS}


def test_lists_of_queries_are_not_refused_either(running: Service) -> None:
    def search_lists(client: int) -> list[int]:
        return [
            running.search({"query": [f"头痛 {client} {number} {each}" for each in range(8)]}).status
            for number in range(3)
        ]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert {status for statuses in pool.map(search_lists, range(16)) for status in statuses} == {200}
