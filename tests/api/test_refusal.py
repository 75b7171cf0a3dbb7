"""Refusals under overload."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
from collections.abc import Iterator
from functools import partial

import httpx

from tests.api.gate import Gate
from tests.api.live import live
from tests.api.support import Built, make_settings
from tests.support.waiting import wait_until

WAIT_SECONDS = 60.0


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(lines[0].split()[1]), headers, body


@contextlib.contextmanager
def full_service(built: Built, gate: Gate) -> Iterator[tuple[str, concurrent.futures.Future[list[int]]]]:
    """Fills the engine with one query and the queue with another; yields the address and both statuses.

    The statuses are known once the gate is open.
    """
    settings = make_settings(built, threads=1, reload_seconds=0, queue_limit=1, max_queries=1)
    with live(settings) as address, concurrent.futures.ThreadPoolExecutor(3) as pool:

        def search_status(query: str) -> int:
            return httpx.get(f"{address}/v1/search", params={"q": query}, timeout=WAIT_SECONDS).status_code

        try:
            while gate.entered.acquire(blocking=False):
                pass
            gate.open.clear()
            first = pool.submit(search_status, "a")
            assert gate.entered.acquire(timeout=WAIT_SECONDS)
            second = pool.submit(search_status, "b")
            metrics = partial(httpx.get, f"{address}/metrics", timeout=WAIT_SECONDS)
            wait_until(lambda: "care_queue_length 1.0" in metrics().text)
            yield address, pool.submit(lambda: [first.result(), second.result()])
        finally:
            gate.open.set()


def test_a_refused_request_leaves_its_connection_usable(built: Built, gate: Gate) -> None:
    body = json.dumps({"query": "c"}).encode()
    search = b"POST /v1/search HTTP/1.1\r\nHost: care\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with full_service(built, gate) as (address, accepted):
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
            connection.sendall(search)
            status, headers, answered = answer_of(connection)
            assert (status, headers["retry-after"]) == (429, "1")
            assert json.loads(answered)["error"]["code"] == "overloaded"
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: care\r\n\r\n")
            assert answer_of(connection)[0] == 200
            gate.open.set()
            assert accepted.result() == [200, 200]
            connection.sendall(search)
            assert answer_of(connection)[0] == 200


def test_a_query_already_in_flight_is_never_refused(built: Built, gate: Gate) -> None:
    with full_service(built, gate) as (address, accepted), concurrent.futures.ThreadPoolExecutor(8) as pool:
        same = [
            pool.submit(httpx.get, f"{address}/v1/search", params={"q": query}, timeout=WAIT_SECONDS)
            for query in "b" * 8
        ]
        assert httpx.get(f"{address}/v1/search", params={"q": "c"}, timeout=WAIT_SECONDS).status_code == 429
        gate.open.set()
        assert accepted.result() == [200, 200]
        assert [answer.result().status_code for answer in same] == [200] * 8


def test_a_body_that_may_hold_many_queries_is_read_before_it_is_refused(built: Built, gate: Gate) -> None:
    with full_service(built, gate) as (address, accepted):
        with httpx.Client(base_url=address, timeout=WAIT_SECONDS) as client:
            # The body itself is invalid, which shows only when it is read.
            many = client.post("/v1/search", json={"query": ["高血压"] * 200})
            assert (many.status_code, many.json()["error"]["field"]) == (422, "query")
            refused = client.get("/v1/search", params={"q": "c"})
            assert refused.status_code == 429
            counted = client.get("/metrics").text
            assert 'care_requests_total{route="/v1/search",status="429"} 1.0' in counted
        gate.open.set()
        assert accepted.result() == [200, 200]
