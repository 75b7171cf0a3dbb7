"""The service as a real process on a real socket: its startup line, unusual clients, and a clean shutdown."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from indexer.store.collection import Collection
from service.errors import PortTaken
from service.processes.server import serve
from service.settings import Settings
from tests.api.support import ENCODER, Built, copy_collection
from tests.integration.processes import started, until

WAIT_SECONDS = 60.0
SERVE = "from service.processes.server import serve; from service.settings import Settings; serve(Settings())"
serving = partial(started, command=SERVE)


@pytest.fixture(scope="module")
def address(built: Built) -> Iterator[str]:
    with serving(built) as (_, address):
        yield address


def exchange(address: str, request: bytes) -> tuple[int, bytes]:
    """Returns status and body of one raw request."""
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
        connection.sendall(request)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_a_url_with_raw_utf_8_is_understood(address: str) -> None:
    line = "GET /v1/search?q=高血压吃什么药&top_k=2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    status, body = exchange(address, line.encode())
    assert status == 200
    assert json.loads(body)["results"][0]["hits"][0]["id"] == "a-1"


def test_a_url_in_another_encoding_gets_422_that_names_the_query(address: str) -> None:
    line = "GET /v1/search?q=高血压 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    status, body = exchange(address, line.encode("gb18030"))
    assert status == 422
    assert json.loads(body)["error"]["field"] == "query"


def test_a_body_that_looks_like_a_request_is_not_parsed_as_one(address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    body = json.dumps({"query": "GET 高血压\r\n"}, ensure_ascii=False).encode()
    head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    begin = body.index(b"GET ")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head + body[:begin])
        # Another exchange in between, so that the pieces arrive separately.
        assert httpx.get(f"{address}/livez", timeout=WAIT_SECONDS).status_code == 200
        connection.sendall(body[begin:])
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    assert b" 200 OK" in received.splitlines()[0]


def test_a_body_too_large_is_refused_on_the_wire(address: str) -> None:
    head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 99999999\r\n\r\n"
    status, body = exchange(address, head)
    assert status == 413
    assert json.loads(body)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"FOO / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/search?q=" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 300_000,
    ],
)
def test_malformed_http_gets_the_shape_of_every_error(address: str, request_bytes: bytes) -> None:
    status, body = exchange(address, request_bytes)
    assert status == 400
    facts = json.loads(body)["error"]
    assert facts["code"] == "malformed_http"
    assert facts["message"]
    assert facts["request_id"]


def test_the_header_limit_applies_to_each_request_of_a_connection(address: str) -> None:
    one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 50_000 + b"\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as connection:
        connection.sendall(one * 10 + last)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    assert received.count(b"HTTP/1.1 200 OK") == 11


def test_a_client_that_leaves_is_counted_and_does_not_affect_others(address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    body = json.dumps({"query": [f"头痛{number}" * 30 for number in range(200)]}).encode()
    request = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with httpx.Client(base_url=address, timeout=WAIT_SECONDS) as client:
        before = clients_that_left(client)
        for _ in range(3):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(request)
                client.get("/livez")  # by the time of this answer, the server has the request
        assert client.get("/v1/search", params={"q": "高血压"}).status_code == 200
        until(lambda: clients_that_left(client) - before == 3)


def clients_that_left(client: httpx.Client) -> float:
    counted = re.findall(
        r'^care_requests_total{route="/v1/search",status="499"} (\S+)$', client.get("/metrics").text, re.M
    )
    return float(counted[0]) if counted else 0.0


def test_sigterm_finishes_the_accepted_requests(built: Built) -> None:
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(serving(built, CARE_SHUTDOWN_SECONDS="120"))
        clients = [stack.enter_context(httpx.Client(base_url=address, timeout=WAIT_SECONDS)) for _ in range(4)]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(4))
        bodies = [{"query": [f"{number} 头痛{text}" * 8 for text in range(100)]} for number in range(4)]
        answers = [
            pool.submit(client.post, "/v1/search", json=body) for client, body in zip(clients, bodies, strict=True)
        ]
        with httpx.Client(base_url=address, timeout=WAIT_SECONDS) as watch:
            # More than three of the four wait: all have been accepted.
            until(lambda: queue_length(watch) > 300 or all(answer.done() for answer in answers))
        process.send_signal(signal.SIGTERM)
        assert [answer.result().status_code for answer in answers] == [200] * 4
        assert all(len(answer.result().json()["results"]) == 100 for answer in answers)
        rest, errors = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, rest, errors) == (0, "", "")


def test_an_incomplete_request_is_answered_at_shutdown(built: Built) -> None:
    with serving(built, CARE_SHUTDOWN_SECONDS="1") as (process, address):
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as client:
            client.sendall(b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            with httpx.Client(base_url=address, timeout=WAIT_SECONDS) as watch:
                until(lambda: "care_requests_in_flight 2.0" in watch.get("/metrics").text)
            process.send_signal(signal.SIGTERM)
            received = client.makefile("rb").read()
        _, errors = process.communicate(timeout=WAIT_SECONDS)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "shutting_down"
        assert "Traceback" not in errors


def queue_length(client: httpx.Client) -> float:
    return float(re.findall(r"^care_queue_length (\S+)$", client.get("/metrics").text, re.MULTILINE)[0])


def test_sighup_loads_the_published_version_and_does_not_end_the_service(built: Built, tmp_path: Path) -> None:
    own = copy_collection(built, tmp_path / "collection")
    with (
        serving(own, CARE_RELOAD_SECONDS="0") as (process, address),
        httpx.Client(base_url=address, timeout=WAIT_SECONDS) as client,
    ):
        for letter in "ba":
            Collection(own.root).publish(own.versions[letter])
            process.send_signal(signal.SIGHUP)
            until(lambda letter=letter: client.get("/readyz").json().get("snapshot") == own.versions[letter])
        assert process.poll() is None


def test_a_version_published_during_startup_is_served_without_polling(built: Built, tmp_path: Path) -> None:
    """SIGHUP is ignored until the snapshot is open, so the pointer is read once more after that."""
    own = copy_collection(built, tmp_path / "collection")
    start_slowly = f"""
from indexer.store.collection import Collection
from service.updates.swap import Servings
start = Servings.start

async def start_and_publish(servings):
    await start(servings)
    Collection(servings.collection.root).publish({own.versions["b"]!r})

Servings.start = start_and_publish
{SERVE}
"""
    with started(own, start_slowly, CARE_RELOAD_SECONDS="0") as (_, address):
        assert httpx.get(f"{address}/readyz", timeout=WAIT_SECONDS).json()["snapshot"] == own.versions["b"]


@pytest.mark.parametrize("drain_seconds", ["0", "0.1"])
def test_a_signal_that_comes_before_the_service_listens_ends_it(built: Built, drain_seconds: str) -> None:
    """It was lost: a worker whose supervisor had ended then stayed, and its engine with it."""
    end_early = f"""
import os, signal
from service.updates.swap import Servings
follow_now = Servings.follow_now

async def end_and_follow(servings):
    os.kill(os.getpid(), signal.SIGTERM)
    await follow_now(servings)

Servings.follow_now = end_and_follow
{SERVE}
"""
    with started(built, end_early, CARE_DRAIN_SECONDS=drain_seconds) as (process, _):
        assert process.wait(WAIT_SECONDS) == 0


def test_sigint_ends_the_service_without_a_traceback(built: Built) -> None:
    with serving(built) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=WAIT_SECONDS) == ("", "")
        assert process.returncode == 0


def test_a_taken_port_is_reported_in_one_line(address: str, built: Built) -> None:
    settings = Settings(collection=built.root, encoder=ENCODER, port=int(address.rpartition(":")[2]))
    with pytest.raises(PortTaken, match="CARE_PORT"):
        serve(settings)


def test_startup_fails_with_the_reason_if_the_snapshot_is_damaged(built: Built, tmp_path: Path) -> None:
    own = copy_collection(built, tmp_path / "collection")
    (own.root / "versions" / own.versions["a"] / "documents.bin").write_bytes(b"")
    environment = os.environ | {"PYTHONPATH": ".", "CARE_COLLECTION": str(own.root), "CARE_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SERVE], env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.returncode == 1
    assert "BadSnapshot" in done.stderr.splitlines()[-1]
    assert "documents.bin" in done.stderr.splitlines()[-1]
    assert "ERROR" not in done.stderr  # reported once, by the caller


def test_access_log_lines_are_json_on_standard_output(built: Built) -> None:
    with serving(built, CARE_ACCESS_LOG="true") as (process, address):
        httpx.get(f"{address}/v1/search", params={"q": "私密"}, timeout=WAIT_SECONDS)
        process.send_signal(signal.SIGTERM)
        written, errors = process.communicate(timeout=WAIT_SECONDS)
    (line,) = written.splitlines()
    assert json.loads(line)["route"] == "/v1/search"
    assert "私密" not in written + errors


def test_importing_the_app_loads_no_torch() -> None:
    imports = "import sys, service.http.app, service.processes.server"
    code = f"{imports}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
