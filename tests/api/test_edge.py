"""Network edge: TLS and mTLS, CORS, connection limits, the port for administrators, security headers."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from service.errors import BadSettings
from service.http.app import create_app
from service.http.protocol import http_config
from service.processes.server import _load_certificates
from tests.api.live import live, live_ports, rest_of
from tests.api.support import AS_ADMIN, Built, make_settings, running
from tests.support.certificates import Certificate
from tests.support.keys import create

FRIEND, STRANGER = "https://friend.example", "https://stranger.example"
HEADERS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY", "referrer-policy": "no-referrer"}
HEADERS |= {"cache-control": "no-store"}
get = partial(httpx.get, timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Certificate:
    return Certificate.authority(folder, "authority")


@pytest.fixture(scope="module")
def server(authority: Certificate, folder: Path) -> Certificate:
    return authority.sign(folder, "server")


def trusting(authority: Certificate, own: Certificate | None = None) -> ssl.SSLContext:
    """Returns a client context that trusts the authority and presents its own certificate."""
    context = ssl.create_default_context(cafile=authority.cert)
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def test_the_service_speaks_https(built: Built, authority: Certificate, server: Certificate) -> None:
    settings = make_settings(built, threads=1, tls_cert=server.cert, tls_key=server.key)
    with live(settings) as address, httpx.Client(verify=trusting(authority), base_url=address, timeout=60) as client:
        assert address.startswith("https://")
        for answer in (client.get("/v1/search?q=高血压"), client.post("/v1/search", json={"query": ["头痛"] * 9})):
            assert answer.status_code == 200
            assert answer.json()["results"][0]["hits"]
            assert answer.headers["strict-transport-security"] == "max-age=63072000"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            get(f"{address}/livez")
        with pytest.raises(httpx.RemoteProtocolError):
            get(address.replace("https", "http") + "/livez")
        # Malformed requests are answered and closed over TLS as without it.
        port = int(address.rpartition(":")[2])
        raw = socket.create_connection(("127.0.0.1", port))
        with trusting(authority).wrap_socket(raw, server_hostname="127.0.0.1") as connection:
            connection.sendall(b"this is no HTTP\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
        assert client.get("/livez").status_code == 200


def test_mtls_accepts_only_certificates_of_the_authority(
    built: Built, authority: Certificate, server: Certificate, folder: Path
) -> None:
    friend = authority.sign(folder, "friend")
    stranger = Certificate.authority(folder, "other").sign(folder, "stranger")
    files = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": authority.cert}
    with live(make_settings(built, threads=1, **files)) as address:
        assert get(f"{address}/livez", verify=trusting(authority, friend)).status_code == 200
        for own in (None, stranger):
            with pytest.raises(httpx.TransportError):
                get(f"{address}/livez", verify=trusting(authority, own))


def test_startup_fails_if_the_tls_files_are_not_certificates(built: Built, server: Certificate, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for cert, key in ((empty, server.key), (server.cert, tmp_path / "missing.key")):
        settings = make_settings(built, tls_cert=cert, tls_key=key)
        with pytest.raises(BadSettings, match="CARE_TLS_CERT"):
            _load_certificates(http_config(create_app(settings), settings))


def test_an_encrypted_key_is_refused_and_its_password_not_asked_for(
    built: Built, server: Certificate, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:x", "-in", server.key, "-out", encrypted]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    settings = make_settings(built, tls_cert=server.cert, tls_key=encrypted)
    with pytest.raises(BadSettings, match="the key is encrypted; decrypt it"):
        _load_certificates(http_config(create_app(settings), settings))
    assert capfd.readouterr() == ("", "")


@pytest.mark.anyio
async def test_cors_allows_listed_origins(built: Built) -> None:
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,api-key"}
    settings = make_settings(built, threads=1, reload_seconds=0, cors_origins=f"{FRIEND}, https://second.example:8443")
    async with running(settings) as client:
        allowed = await client.options("/v1/search", headers={"Origin": FRIEND} | preflight)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, FRIEND)
        assert "api-key" in allowed.headers["access-control-allow-headers"].lower()
        refused = await client.options("/v1/search", headers={"Origin": STRANGER} | preflight)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        for path, status in (("/v1/search?q=a", 200), ("/v1/search", 422), ("/v1/collection", 200), ("/nowhere", 404)):
            friend = await client.get(path, headers={"Origin": FRIEND})
            assert (friend.status_code, friend.headers["access-control-allow-origin"]) == (status, FRIEND)
            assert "x-request-id" in friend.headers["access-control-expose-headers"].lower()
            stranger = await client.get(path, headers={"Origin": STRANGER})
            assert "access-control-allow-origin" not in stranger.headers
            assert "origin" in stranger.headers.get("vary", "origin").lower()


@pytest.mark.anyio
async def test_a_preflight_needs_no_key_and_a_refusal_is_readable_by_the_page(built: Built, tmp_path: Path) -> None:
    create(tmp_path / "keys.json", "a", "--scope", "search")
    files = {"keys_file": tmp_path / "keys.json", "admin_token": None}
    async with running(make_settings(built, threads=1, reload_seconds=0, cors_origins="*", **files)) as client:
        asked = {"Origin": FRIEND, "Access-Control-Request-Method": "POST", "Authorization": ""}
        assert (await client.options("/v1/search", headers=asked)).status_code == 200
        refused = await client.get("/v1/search?q=a", headers={"Origin": FRIEND, "Authorization": ""})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
        assert "access-control-allow-credentials" not in refused.headers


@pytest.mark.anyio
async def test_without_a_list_cors_allows_no_other_origin(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0)) as client:
        answer = await client.get("/v1/search?q=a", headers={"Origin": FRIEND})
        assert not [name for name in answer.headers if name.startswith("access-control")]


@contextlib.contextmanager
def connections(address: str, count: int) -> Iterator[list[http.client.HTTPConnection]]:
    """Opens connections that were each answered once and stay open."""
    made = [http.client.HTTPConnection("127.0.0.1", int(address.rpartition(":")[2]), timeout=60) for _ in range(count)]
    try:
        for connection in made:
            assert status(connection) == 200
        yield made
    finally:
        for connection in made:
            connection.close()


def status(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/livez")
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize(
    ("setting", "refused"), [("max_connections", b"503 Service"), ("max_address_connections", b"429 Too")]
)
def test_connections_beyond_the_limit_are_answered_and_closed(built: Built, setting: str, refused: bytes) -> None:
    with live(make_settings(built, threads=1, **{setting: 3})) as address:
        port = int(address.rpartition(":")[2])
        with connections(address, 3) as held:
            for _ in range(5):
                with socket.create_connection(("127.0.0.1", port)) as late:
                    answer = rest_of(late)
                assert answer.startswith(b"HTTP/1.1 " + refused)
                assert b"retry-after: 1\r\n" in answer
                assert b"crowded" in answer
            assert [status(connection) for connection in held] == [200] * 3, "established connections stay open"
        with connections(address, 3):
            pass  # closing connections makes room for others


def test_admin_routes_are_served_on_their_own_port_only(built: Built) -> None:
    with live_ports(make_settings(built, threads=1, admin_port=0)) as (address, admin):
        for path in ("/admin/versions", "/metrics"):
            forged = {**AS_ADMIN, "Host": admin.removeprefix("http://"), "X-Forwarded-Port": admin.rpartition(":")[2]}
            for headers in (AS_ADMIN, forged):
                assert get(address + path, headers=headers).status_code == 404
            assert get(admin + path, headers=AS_ADMIN).status_code == 200
        assert get(f"{admin}/admin/versions").status_code == 401
        for each in (address, admin):
            assert get(f"{each}/v1/search?q=a").status_code == get(f"{each}/livez").status_code == 200


def test_every_answer_has_the_security_headers(built: Built) -> None:
    reads = ["/", "/docs", "/static/app.js", "/v1/search?q=a", "/v1/search", "/v1/collection", "/nowhere", "/admin/x"]
    asked = [("GET", path, {}) for path in (*reads, "/livez", "/metrics")]
    asked += [
        ("GET", "/v1/search?q=a", {"Accept": "application/x-ndjson"}),
        ("HEAD", "/", {}),
        ("PUT", "/v1/search", {}),
    ]
    asked += [("GET", "/admin/versions", AS_ADMIN)]
    asked += [("OPTIONS", "/v1/search", {"Origin": FRIEND, "Access-Control-Request-Method": "POST"})]
    with (
        live(make_settings(built, threads=1, cors_origins=FRIEND)) as address,
        httpx.Client(
            base_url=address, timeout=60
        ) as client,  # one connection: state left by one answer would affect the next
    ):
        for method, path, headers in asked:
            answer = client.request(method, path, headers=headers)
            for name, value in HEADERS.items():
                assert answer.headers.get_list(name) == [value], (method, path, name)
            assert b"nosniff" not in answer.content
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(b"no HTTP\r\n\r\n")
            raw.shutdown(socket.SHUT_WR)
            malformed = rest_of(raw)
        assert all(malformed.count(f"{name}: {value}\r\n".encode()) == 1 for name, value in HEADERS.items())
        head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 13\r\n"
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(head + b"Connection: close\r\n\r\n")
            assert raw.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.sendall(b'{"query":"a"}')
            assert rest_of(raw).startswith(b"HTTP/1.1 200 OK\r\nx-content-type-options: nosniff\r\n")
