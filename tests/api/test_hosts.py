"""Host names that are answered, on a real socket: a name that resolves to this machine may belong to another site."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from service.settings import Settings
from tests.api.live import live
from tests.api.support import AS_ADMIN, Built, copy_collection, make_settings

EVIL = "attacker.example:8000"
ROUTES = ["/v1/search?q=a", "/livez", "/", "/static/app.js", "/docs", "/openapi.json", "/v1/collection", "/nowhere"]


class Reply(NamedTuple):
    """Status, headers and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture(scope="module")
def port(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    own = copy_collection(built, tmp_path_factory.mktemp("hosts") / "collection")
    with live(make_settings(own, threads=1, allowed_hosts=None)) as address:
        yield int(address.rpartition(":")[2])


def send(port: int, host: str | None, path: str, method: str = "GET", body: object = None, **headers: str) -> Reply:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host=True)
        sent = b"" if body is None else json.dumps(body).encode()
        for name, value in ({} if host is None else {"Host": host} | headers).items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(sent)))
        connection.endheaders(sent)
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


@pytest.mark.parametrize("path", ROUTES)
def test_a_foreign_host_name_that_resolves_to_loopback_is_refused_on_every_route(port: int, path: str) -> None:
    reply = send(port, EVIL, path)
    assert reply.status == 421
    error = json.loads(reply.body)["error"]
    assert error["code"] == "unknown_host"
    assert "CARE_ALLOWED_HOSTS" in error["message"]


def test_a_rebound_page_cannot_post_or_search(port: int) -> None:
    document = {"documents": [{"id": "evil", "text": "evil"}]}
    origin = f"http://{EVIL}"
    assert send(port, EVIL, "/v1/documents", "POST", document, Origin=origin, **AS_ADMIN).status == 421
    assert send(port, EVIL, "/v1/search", "POST", {"query": "高血压"}, Origin=origin).status == 421
    assert send(port, "127.0.0.1", "/v1/documents/evil").status == 404


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "10.0.0.7", None]
)
def test_localhost_ip_addresses_and_a_missing_host_are_answered(port: int, host: str | None) -> None:
    assert send(port, host, "/livez").status == 200
    assert send(port, host, "/v1/search?q=a").status == 200


@pytest.mark.parametrize(
    "host", ["", "localhost.attacker.example", "127.0.0.1.attacker.example", "localhost:1:2", "localhost@x"]
)
def test_hosts_that_resemble_this_machine_are_refused(port: int, host: str) -> None:
    assert send(port, host, "/livez").status == 421


@pytest.mark.parametrize("first", [EVIL, "localhost"])
def test_two_host_headers_are_refused(port: int, first: str) -> None:
    assert send(port, first, "/livez", HOST="localhost").status == 421
    assert send(port, "localhost", "/livez", Accept="a/b", accept="c/d").status == 200, "other headers may be repeated"


def test_forwarded_headers_are_ignored_whatever_the_environment_sets(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with live(make_settings(built, threads=1, allowed_hosts=None, admin_token=None)) as address:
        port = int(address.rpartition(":")[2])
        forged = {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "localhost", "X-Forwarded-Proto": "https"}
        assert send(port, EVIL, "/livez", **forged).status == 421
        assert send(port, "localhost", "/admin/reload", "POST", **forged).status == 403
        # The framework would redirect this to a host and scheme taken from the headers.
        assert send(port, "localhost", "/v1/models/", **forged).status == 404


@pytest.mark.parametrize(
    ("values", "answered", "refused"),
    [
        ({"host": "127.0.0.1"}, [], ["care.example"]),
        ({"host": "::1"}, [], ["care.example"]),
        ({"host": "localhost"}, [], ["care.example"]),
        ({"host": "LOCALHOST"}, [], ["care.example"]),
        ({"host": "127.1"}, [], ["care.example"]),
        ({"host": "::ffff:127.0.0.1"}, [], ["care.example"]),
        ({"host": "0.0.0.0"}, ["care.example"], []),
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, ["a.example"], ["care.example"]),
        ({"allowed_hosts": "a.example, B.example"}, ["a.example", "b.example"], ["c.example"]),
        ({"allowed_hosts": "a.example,*"}, ["care.example"], []),
    ],
)
def test_allowed_hosts_default_to_the_bound_address(
    values: dict[str, str], answered: list[str], refused: list[str]
) -> None:
    names = Settings(**values).host_names  # type: ignore[arg-type]
    assert all(names is None or name in names for name in answered)
    assert not any(names is None or name in names for name in refused)
