"""Retries of the client when a service refuses, drops connections or sends invalid answers."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from care_client import (
    ApiError,
    BadAnswer,
    CareClient,
    CareClientError,
    ConnectionFailed,
    DeadlineExceeded,
    Health,
    InvalidRequest,
    NotFound,
    Overloaded,
    Retry,
    Unavailable,
)
from care_client.calls import Attempts, collection, health

from tests.clients.support import DROP, ScriptedReply, ScriptedServer, refusal

QUICK = Retry(attempts=4, first_seconds=0.001)


def test_waits_grow_with_jitter_up_to_a_limit() -> None:
    waits: list[list[float]] = []
    for _ in range(200):
        attempts = Attempts(Retry(attempts=6, first_seconds=0.1, longest_seconds=0.5))
        waits.append([attempts.next_wait() or 0.0 for _ in range(5)])
    for number, most in enumerate([0.1, 0.2, 0.4, 0.5, 0.5]):
        drawn = [each[number] for each in waits]
        assert most / 2 <= min(drawn) < max(drawn) <= most


def test_attempts_and_the_total_wait_are_bounded() -> None:
    few = Attempts(Retry(attempts=3))
    assert [few.next_wait() is None for _ in range(3)] == [False, False, True]
    short = Attempts(Retry(attempts=100, total_seconds=10))
    assert short.next_wait(6.0) == 6.0
    assert short.next_wait(6.0) is None


@pytest.mark.parametrize(
    ("retry_after", "least"),
    [("3", 3.0), ("0.25", 0.25), ("-1", 0.05), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.05), ("", 0.05)],
)
def test_the_wait_is_never_shorter_than_retry_after(retry_after: str, least: float) -> None:
    response = httpx.Response(429, headers={"Retry-After": retry_after})
    wait = collection().pause(response, Attempts(Retry(first_seconds=0.1)))
    assert wait is not None
    assert least <= wait <= max(least, 0.1)


def test_there_is_no_retry_if_retry_after_exceeds_the_limit() -> None:
    response = httpx.Response(503, headers={"Retry-After": "3600"})
    assert collection().pause(response, Attempts(Retry())) is None


def test_health_does_not_wait_for_a_service_to_become_ready() -> None:
    assert health().pause(httpx.Response(503), Attempts(Retry())) is None


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (refusal(503, "not_ready"), "said the service"),
        (ScriptedReply(503, b"<h1>No server</h1>"), "Service Unavailable"),
        (ScriptedReply(502, b"<h1>No server</h1>"), "Bad Gateway"),
    ],
)
def test_health_tells_why_a_service_is_not_ready_also_behind_a_proxy(
    make: type[CareClient], scripted: ScriptedServer, reply: ScriptedReply, reason: str
) -> None:
    scripted.replies.append(reply)
    assert make(scripted.url).health() == Health(False, None, reason)


@pytest.mark.parametrize("reply", [refusal(429, "overloaded"), refusal(503, "not_ready", retry_after=None), DROP])
def test_a_temporary_failure_is_retried(make: type[CareClient], scripted: ScriptedServer, reply: ScriptedReply) -> None:
    scripted.replies.extend([reply, reply, ScriptedReply()])
    answer = make(scripted.url, retry=QUICK).search("发热", top_k=3)
    assert answer.hits == ()
    assert [request[2] for request in scripted.requests] == [{"query": "发热", "top_k": 3}] * 3


@pytest.mark.parametrize(
    ("status", "code", "kind"), [(429, "overloaded", Overloaded), (503, "engine_failed", Unavailable)]
)
def test_a_permanent_refusal_is_raised_after_the_last_attempt(
    make: type[CareClient], scripted: ScriptedServer, status: int, code: str, kind: type[ApiError]
) -> None:
    scripted.replies.extend([refusal(status, code)] * 4)
    with pytest.raises(kind, match="said the service") as caught:
        make(scripted.url, retry=QUICK).collection()
    error = caught.value
    assert (error.status, error.code, error.request_id) == (status, code, "r-1")
    assert len(scripted.requests) == 4


@pytest.mark.parametrize(
    ("status", "kind"), [(422, InvalidRequest), (413, InvalidRequest), (404, NotFound), (504, DeadlineExceeded)]
)
def test_permanent_errors_are_raised_at_once(
    make: type[CareClient], scripted: ScriptedServer, status: int, kind: type[ApiError]
) -> None:
    scripted.replies.append(refusal(status, "no"))
    with pytest.raises(kind):
        make(scripted.url, retry=QUICK).search("发热")
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("page", [b"<h1>Bad Gateway</h1>", b"[" * 9999])
def test_an_error_page_of_a_proxy_raises_an_error(
    make: type[CareClient], scripted: ScriptedServer, page: bytes
) -> None:
    scripted.replies.append(ScriptedReply(502, page, {"X-Request-Id": "r-2"}))
    with pytest.raises(ApiError) as caught:
        make(scripted.url, retry=QUICK).search("发热")
    assert (caught.value.status, caught.value.request_id) == (502, "r-2")


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b"{}", b'{"results": [{}]}', b"\xff", b"[" * 9999])
def test_an_invalid_answer_raises_an_error_that_says_so(
    make: type[CareClient], scripted: ScriptedServer, body: bytes
) -> None:
    scripted.replies.append(ScriptedReply(200, body))
    with pytest.raises(BadAnswer):
        make(scripted.url, retry=QUICK).search("发热")


def test_connections_that_keep_breaking_raise_an_error(make: type[CareClient], scripted: ScriptedServer) -> None:
    scripted.replies.extend([DROP] * 4)
    with pytest.raises(ConnectionFailed, match="no answer from http://127"):
        make(scripted.url, retry=QUICK).search("发热")
    assert len(scripted.requests) == 4


def test_an_unreachable_service_is_reported(make: type[CareClient]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound but not listening, so that no other program takes the port
        with pytest.raises(ConnectionFailed):
            make(f"http://127.0.0.1:{free.getsockname()[1]}", retry=QUICK).health()


def test_a_timeout_is_not_retried(make: type[CareClient], scripted: ScriptedServer) -> None:
    scripted.replies.append(ScriptedReply(silent=True))
    with pytest.raises(ConnectionFailed, match=r"timed out|ReadTimeout"):
        make(scripted.url, retry=QUICK, timeout_seconds=1.5).search("发热")
    assert len(scripted.requests) == 1


LINE = b'{"hits": [{"id": "1", "score": 0.5}], "truncated": false}\n'
END = b'{"snapshot": "v1", "timings_ms": {"total": 1.0}}\n'


def test_a_stream_is_retried_until_it_begins(make: type[CareClient], scripted: ScriptedServer) -> None:
    scripted.replies.extend([refusal(429, "overloaded"), DROP, ScriptedReply(200, LINE + LINE + END)])
    results = list(make(scripted.url, retry=QUICK).stream(["a", "b"], mode="dense"))
    assert [result.hits[0].id for result in results] == ["1", "1"]
    method, path, body, headers = scripted.requests[-1]
    assert (method, path, body) == ("POST", "/v1/search", {"query": ["a", "b"], "mode": "dense"})
    assert headers["accept"] == "application/x-ndjson"


def test_a_stream_that_breaks_off_raises_an_error(make: type[CareClient], scripted: ScriptedServer) -> None:
    client = make(scripted.url, retry=QUICK)
    for reply in (ScriptedReply(200, LINE), ScriptedReply(200, LINE, drop=True)):
        scripted.replies.append(reply)
        results = client.stream(["a", "b"])
        assert next(results).hits[0].score == 0.5
        with pytest.raises(ConnectionFailed, match="broke off"):
            next(results)


def test_a_stream_that_fails_midway_raises_the_error_of_the_service(
    make: type[CareClient], scripted: ScriptedServer
) -> None:
    failure = b'{"error": {"code": "engine_failed", "message": "try again", "request_id": "r-3"}}\n'
    scripted.replies.append(ScriptedReply(200, LINE + failure))
    results = make(scripted.url, retry=QUICK).stream(["a", "b"])
    next(results)
    with pytest.raises(ApiError, match="try again") as caught:
        next(results)
    assert caught.value.request_id == "r-3"


def test_an_answer_in_place_of_a_stream_raises_an_error(make: type[CareClient], scripted: ScriptedServer) -> None:
    scripted.replies.append(ScriptedReply())
    with pytest.raises(BadAnswer, match="Accept"):
        list(make(scripted.url, retry=QUICK).stream(["a"]))


def test_headers_and_ids_reach_the_service_unchanged(make: type[CareClient], scripted: ScriptedServer) -> None:
    facts = {"id": "a/b ?#%", "title": "", "text": "", "metadata": {}, "snapshot": "v1"}
    scripted.replies.append(ScriptedReply(200, facts))
    client = make(scripted.url, headers={"Authorization": "Bearer key"})
    assert client.document("a/b ?#%").id == "a/b ?#%"
    _, path, _, headers = scripted.requests[0]
    assert path == "/v1/documents/a%2Fb%20%3F%23%25"
    assert headers["authorization"] == "Bearer key"


def test_a_key_may_end_with_a_line_break(make: type[CareClient], scripted: ScriptedServer) -> None:
    scripted.replies.append(ScriptedReply())
    make(scripted.url, api_key="key\n").search("发热")
    *_, headers = scripted.requests[0]
    assert headers["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    "headers",
    [{"api-key": "geheim\n2"}, {"api-key": "geheim-ü"}, {"api-key": b"geheim\x00"}, {"geheim-ü": "x"}, {"geheim": 1}],
)
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(make: type[CareClient], headers: dict[str, Any]) -> None:
    with pytest.raises(CareClientError, match="visible ASCII") as refused:
        make("http://127.0.0.1:1", headers=headers)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("HTTP_PROXY", "ftp://proxy:1", "Unknown scheme for proxy URL"),
        ("ALL_PROXY", "http://proxy:port", "Invalid port: 'port'"),
    ],
)
def test_a_wrong_proxy_of_the_environment_is_named(
    make: type[CareClient], monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(CareClientError, match=f"{reason}.*; check the service's address, and the proxies .*{name}"):
        make("http://127.0.0.1:1")


@pytest.mark.parametrize("key", ["geheim-ü", "geheim\n2", "geheim\x00"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(make: type[CareClient], key: str) -> None:
    with pytest.raises(CareClientError, match="API key holds a character that is not visible ASCII") as refused:
        make("http://127.0.0.1:1", api_key=key)
    assert "geheim" not in str(refused.value)
