"""Connections that send nothing or only part of a request: answered 408 if a request was begun, and closed."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator

import pytest

from service.http.protocol import TolerantProtocol
from tests.api.live import live, rest_of
from tests.api.support import Built, make_settings
from tests.integration.processes import until

WAIT_SECONDS = 60
HEAD = b"POST /v1/search HTTP/1.1\r\nHost: care\r\nContent-Length: 40\r\n"
CHUNKS = b"POST /v1/search HTTP/1.1\r\nHost: care\r\nTransfer-Encoding: chunked\r\n\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: care\r\n\r\n"


@pytest.fixture(scope="module")
def address(built: Built) -> Iterator[tuple[str, int]]:
    settings = make_settings(built, threads=1, reload_seconds=0, receive_seconds=0.7, keep_alive_seconds=2)
    with live(settings) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)


@contextlib.contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=WAIT_SECONDS) as connection:
        yield connection


def answer_in(received: bytes) -> bytes:
    """Returns one whole answer: the head and as much body as it declares."""
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + body if len(body) >= length else b""


def read_answer(connection: socket.socket) -> bytes:
    received = b""
    while not (b"\r\n\r\n" in received and answer_in(received)):
        chunk = connection.recv(65536)
        assert chunk, received
        received += chunk
    return received


@pytest.mark.parametrize(
    "begun",
    [b"G", b"GET /livez HTTP/1.1\r\nHost: ca", HEAD, HEAD + b"\r\n", HEAD + b'\r\n{"query": "'],
    ids=["a letter", "half a header", "no end of the head", "no body", "half a body"],
)
def test_a_request_that_never_ends_is_answered_408_and_closed(address: tuple[str, int], begun: bytes) -> None:
    with connected(address) as connection:
        connection.sendall(begun)
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["code"] == "slow_request"
    assert error["request_id"].encode() in head


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"G", 408), (HEAD + b"\r\n", 408), (b"nonsense\r\n\r\n", 400), (CHUNKS + b"zz\r\n", 400)],
    ids=["no head", "no body", "no HTTP", "no chunk"],
)
def test_malformed_requests_are_counted_by_the_status_of_their_answer(
    address: tuple[str, int], sent: bytes, status: int
) -> None:
    before = counted(address)
    with connected(address) as connection:
        connection.sendall(sent)
        assert rest_of(connection).startswith(b"HTTP/1.1 %d " % status)
    until(lambda: counted(address)[str(status)] > before[str(status)])


def counted(address: tuple[str, int]) -> Counter[str]:
    """Counts requests by status, without those for metrics."""
    with connected(address) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: care\r\nConnection: close\r\n\r\n")
        text = rest_of(connection).decode()
    found = re.findall(r'^care_requests_total{route="(?!/metrics)[^"]*",status="(\d+)"} (\S+)$', text, re.MULTILINE)
    return sum((Counter({status: int(float(count))}) for status, count in found), Counter())


def test_sending_single_bytes_does_not_extend_the_timeout(address: tuple[str, int]) -> None:
    sent = 0
    with connected(address) as connection:
        connection.settimeout(0.05)
        connection.sendall(HEAD)
        received = b""
        while not received and sent < 10 * WAIT_SECONDS:
            with contextlib.suppress(TimeoutError):
                received = connection.recv(65536)
            if not received:
                connection.sendall(b"X-A: b\r\n")
                sent += 1
    assert received.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_a_connection_without_a_request_is_closed_without_an_answer(address: tuple[str, int], sent: bytes) -> None:
    with connected(address) as connection:
        connection.sendall(sent)
        assert rest_of(connection) == b""


@pytest.mark.parametrize("after", [b"", b"\r\n"], ids=["silence", "an empty line"])
def test_an_idle_connection_is_closed_after_its_answer(address: tuple[str, int], after: bytes) -> None:
    with connected(address) as connection:
        connection.sendall(LIVEZ)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(after)
        assert rest_of(connection) == b""


def test_a_second_request_that_never_ends_is_answered_too(address: tuple[str, int]) -> None:
    with connected(address) as connection:
        connection.sendall(LIVEZ)
        read_answer(connection)
        connection.sendall(HEAD)
        assert rest_of(connection).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_was_answered_before_its_end_is_cut_off(address: tuple[str, int]) -> None:
    with connected(address) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: care\r\nContent-Length: 40\r\n\r\n{")
        received = rest_of(connection)
    assert received.startswith(b"HTTP/1.1 404 ")
    assert received.count(b"HTTP/1.1") == 1


def test_clients_that_send_at_once_are_not_affected(address: tuple[str, int]) -> None:
    body = '{"query": "高血压"}'.encode()
    whole = b"POST /v1/search HTTP/1.1\r\nHost: care\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with connected(address) as connection:
        for _ in range(3):
            connection.sendall(whole)
            assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_never_reads_its_answer_is_disconnected(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TolerantProtocol, "stalled_seconds", 0.3)
    body = json.dumps({"query": ["高血压"] * 10_000, "fields": ["title", "snippet", "text", "metadata"]}).encode()
    head = b"POST /v1/search HTTP/1.1\r\nHost: care\r\nAccept: application/x-ndjson\r\nContent-Length: %d\r\n\r\n"
    with live(make_settings(built, threads=1, reload_seconds=0, lru_mb=1)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        received = b""
        with socket.socket() as connection, contextlib.suppress(ConnectionResetError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(WAIT_SECONDS)
            connection.connect((host, int(port)))
            connection.sendall(head % len(body) + body)
            until(lambda: counted((host, int(port)))["200"] == 1)
            while chunk := connection.recv(65536):
                received += chunk
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"timings_ms"' not in received[-1000:]
