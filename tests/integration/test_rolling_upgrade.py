"""Rolling upgrade: a stopping service first fails readiness; two behind the documented proxy are replaced unnoticed."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.lab.overload import proxy, several
from tests.api.support import Built
from tests.e2e.server import Server
from tests.integration.processes import until

WAIT_SECONDS = 60.0
DRAIN_SECONDS = "4"
CLIENTS = 4


@pytest.fixture
def services(built: Built, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    monkeypatch.setenv("CARE_DRAIN_SECONDS", DRAIN_SECONDS)
    servers = [Server(built.root), Server(built.root)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()  # no request is left to wait for


def test_readiness_fails_first_and_searches_are_still_answered(services: list[Server]) -> None:
    service = services[0]
    service.start()
    process = service._process
    assert process is not None
    process.send_signal(signal.SIGTERM)

    def refused() -> bool:
        answer = httpx.get(f"{service.url}/readyz", timeout=WAIT_SECONDS)
        return answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"

    until(refused)
    assert httpx.get(f"{service.url}/livez", timeout=WAIT_SECONDS).status_code == 200
    assert httpx.get(f"{service.url}/v1/search?q=高血压", timeout=WAIT_SECONDS).status_code == 200
    process.send_signal(signal.SIGTERM)  # a second signal does not wait
    assert process.wait(WAIT_SECONDS) == 0


def test_a_rolling_upgrade_behind_the_proxy_fails_no_request(services: list[Server], tmp_path: Path) -> None:
    for service in services:
        service.start()
    answers: Counter[object] = Counter()
    over = threading.Event()

    def search_without_pause(url: str) -> None:
        with httpx.Client(base_url=url, timeout=WAIT_SECONDS) as client:
            while not over.is_set():
                try:
                    answer = client.get("/v1/search", params={"q": "高血压"})
                    answers[answer.status_code] += 1
                except httpx.HTTPError as error:
                    answers[repr(error)] += 1
                over.wait(0.05)

    with proxy(services[0].url, 64, several([service.url for service in services], tmp_path)) as url:
        threads = [threading.Thread(target=search_without_pause, args=(url,)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            for service in services:
                service.stop()
                before = answers.total()
                until(lambda before=before: answers.total() > before + 20)  # answered by the other service
                service.start()
                time.sleep(2.5)  # until the proxy has noticed, which takes two checks
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert answers.keys() == {200}, answers
    assert answers[200] > 100
