"""HTTP/1.1 on the wire: single-packet answers, empty bodies, pipelining, Expect: 100-continue, lingering close."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from service.http.protocol import CONTINUE, MAX_HEAD_BYTES, TolerantProtocol, _Joined
from tests.api.live import live, rest_of
from tests.api.support import Built, make_settings

WAIT_SECONDS = 60
HOST = b"Host: care\r\n"
LAST = HOST + b"Connection: close\r\n\r\n"


@pytest.fixture(scope="module")
def address(built: Built) -> Iterator[tuple[str, int]]:
    with live(make_settings(built, threads=1, reload_seconds=0)) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)


@pytest.fixture
def connection(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=WAIT_SECONDS) as connection:
        yield connection


def test_an_answer_without_a_body_is_sent(connection: socket.socket) -> None:
    connection.sendall(b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n")
    head = connection.recv(65536)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.endswith(b"\r\n\r\n")
    # The connection is still usable for another request.
    connection.sendall(b"GET /livez HTTP/1.1\r\n" + LAST)
    assert rest_of(connection).endswith(b'{"status":"alive","snapshot":null}')


def test_expect_100_continue_is_answered_before_the_body(connection: socket.socket) -> None:
    body = '{"query": "高血压"}'.encode()
    head = b"POST /v1/search HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n" % len(body)
    connection.sendall(head + LAST)
    assert connection.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
    connection.sendall(body)
    assert rest_of(connection).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("header", [b"Upgrade", b"UPGRADE", b"UpGrade"])
@pytest.mark.parametrize("packet_bytes", [100_000, 37, 1])
def test_an_upgrade_to_another_protocol_is_ignored(connection: socket.socket, header: bytes, packet_bytes: int) -> None:
    """Java's HTTP client and curl --http2 send one with every request."""
    body = '{"query": "高血压", "fields": []}'.encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\n%b: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n" % header
    asked = b"POST /v1/search HTTP/1.1\r\nContent-Length: %d\r\n" % len(body) + HOST + offer + b"\r\n" + body
    sent = asked + asked + b"GET /livez HTTP/1.1\r\n" + offer + HOST + b"\r\n" + b"GET /livez HTTP/1.1\r\n" + LAST
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(sent), packet_bytes):
        connection.sendall(sent[start : start + packet_bytes])
    answered = rest_of(connection)
    assert answered.count(b"HTTP/1.1 200 OK\r\n") == 4
    assert answered.count(b'{"results":[{"hits":[{') == 2


def test_many_offers_in_one_packet_are_ignored(
    address: tuple[str, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = b"GET /livez HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n" + HOST + b"\r\n"
    receive = TolerantProtocol.data_received
    monkeypatch.setattr(TolerantProtocol, "data_received", lambda protocol, data: receive(protocol, 1500 * offered))
    with socket.create_connection(address, timeout=WAIT_SECONDS) as connection:
        connection.sendall(b"a")
        received = b""
        while received.count(b"HTTP/1.1 200 OK\r\n") < 1500:
            packet = connection.recv(65536)
            assert packet, "the connection was cut"
            received += packet
    assert not caplog.records


def test_a_url_beyond_ascii_may_come_in_several_packets(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte after the method is a packet of its own for the protocol."""
    receive = TolerantProtocol.data_received

    def receive_bytes(protocol: TolerantProtocol, data: bytes) -> None:
        for packet in (data[:4], *(bytes([byte]) for byte in data[4:])):
            receive(protocol, packet)

    monkeypatch.setattr(TolerantProtocol, "data_received", receive_bytes)
    connection.sendall("GET /v1/search?q=高血压&fields= HTTP/1.1\r\nX-Name: 名\r\n".encode() + LAST)
    assert rest_of(connection).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_connect_tunnel_is_refused(connection: socket.socket) -> None:
    connection.sendall(b"CONNECT care:80 HTTP/1.1\r\n" + HOST + b"\r\n")
    assert rest_of(connection).startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_are_answered_in_order(connection: socket.socket) -> None:
    connection.sendall(b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\nHEAD / HTTP/1.1\r\n" + HOST + b"\r\n")
    connection.sendall(b"GET /nowhere HTTP/1.1\r\n" + LAST)
    lines = [line for line in rest_of(connection).split(b"\r\n") if b"HTTP/1.1 " in line]
    assert [line.split(b"HTTP/1.1 ")[1][:3] for line in lines] == [b"200", b"200", b"404"]


def test_json_lines_are_chunks_of_one_answer(connection: socket.socket) -> None:
    head = b"GET /v1/search?q=headache&q=asthma HTTP/1.1\r\nAccept: application/x-ndjson\r\n"
    connection.sendall(head + LAST)
    head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body.endswith(b"0\r\n\r\n")
    assert body.count(b'{"hits":') == 2


def test_a_client_still_sending_when_refused_can_read_the_reason(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.protocol.LINGER_SECONDS", 2 * WAIT_SECONDS)
    connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES)
    received = connection.recv(1)
    for _ in range(20):  # the second send would fail if the connection were closed already
        connection.sendall(b"a" * 65536)
    received += rest_of(connection)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b'"malformed_http"' in received


def test_a_refused_client_that_keeps_sending_is_disconnected(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.http.protocol.LINGER_SECONDS", 0.01)
    connection.sendall(b"nonsense\r\n\r\n")
    assert rest_of(connection).startswith(b"HTTP/1.1 400 ")
    with pytest.raises(ConnectionError):
        send_without_end(connection)


def send_without_end(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"a" * 65536)


class Transport:
    """Records what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
def joined(transport: Transport) -> _Joined:
    return _Joined(transport, b"a: b\r\n")  # type: ignore[arg-type]


def test_the_head_is_sent_together_with_the_first_body_chunk(transport: Transport, joined: _Joined) -> None:
    answer = [b"HTTP/1.1 200 OK\r\n\r\n", b"one", b"HTTP/1.1 200 OK\r\nas a body"]
    for data in answer:
        joined.write(data)
    assert transport.written == [b"HTTP/1.1 200 OK\r\na: b\r\n\r\none", answer[2]]
    joined.flush()
    for data in answer[:2]:
        joined.write(data)
    assert transport.written[2:] == transport.written[:1], "like every answer of a connection"


def test_a_head_without_a_body_is_sent_when_the_answer_ends(transport: Transport, joined: _Joined) -> None:
    joined.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert transport.written == []
    joined.flush()
    joined.flush()
    assert transport.written == [b"HTTP/1.1 204 No Content\r\na: b\r\n\r\n"]


def test_an_interim_answer_is_written_at_once(transport: Transport, joined: _Joined) -> None:
    joined.write(CONTINUE)
    assert transport.written == [CONTINUE]


def test_closing_writes_what_is_buffered(transport: Transport, joined: _Joined) -> None:
    joined.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n{}")
    joined.close()
    assert transport.written == [b"HTTP/1.1 408 Request Timeout\r\na: b\r\n\r\n{}"]
    assert joined.is_closing()
