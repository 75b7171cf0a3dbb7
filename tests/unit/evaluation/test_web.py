import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import models.endpoint
from models.endpoint import ATTEMPTS, LONGEST_PAUSE_SECONDS, Completion, Endpoint, chat
from models.errors import CareError
from tests.support.http_thread import QuietHandler, serving_http
from tests.support.json_server import Reply, json_server


def replies(*answers: Reply) -> Iterator[Reply]:
    yield from answers


def test_json_objects_are_sent_and_received() -> None:
    with json_server(lambda path, body: (200, {"path": path, "got": body})) as server:
        endpoint = Endpoint(f"{server.url}/v1/", {"authorization": "Bearer key"})
        assert endpoint.post("/ask", {"问": 1}) == {"path": "/v1/ask", "got": {"问": 1}}
        assert endpoint.get("/facts") == {"path": "/v1/facts", "got": None}
        endpoint.close()
    assert server.requests[0][2]["authorization"] == "Bearer key"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_temporary_errors_are_retried(status: int) -> None:
    answers = replies((status, {}), (status, {}), (200, {"ok": True}))
    pauses: list[float] = []
    with json_server(lambda path, body: next(answers)) as server:
        endpoint = Endpoint(server.url, pause=pauses.append)
        assert endpoint.post("/x", {}) == {"ok": True}
        endpoint.close()
    assert pauses == sorted(pauses)
    assert len(pauses) == 2


@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("86400", LONGEST_PAUSE_SECONDS)])
def test_retry_after_is_respected(asked: str, waited: float) -> None:
    answers = replies((429, {}), (200, {}))
    pauses: list[float] = []
    with json_server(lambda path, body: next(answers), {"retry-after": asked}) as server:
        endpoint = Endpoint(server.url, pause=pauses.append)
        endpoint.get("/x")
        endpoint.close()
    assert pauses == [waited]


def test_a_permanent_error_is_raised_after_all_attempts() -> None:
    with json_server(lambda path, body: (503, {"error": "down"})) as server:
        endpoint = Endpoint(server.url, pause=lambda seconds: None)
        with pytest.raises(CareError, match=r"/x answers 503.*down"):
            endpoint.get("/x")
        assert len(server.requests) == ATTEMPTS
        endpoint.close()
    gone = Endpoint(server.url, pause=lambda seconds: None)
    with pytest.raises(CareError, match=r"/x does not answer .*is it running"):
        gone.get("/x")
    gone.close()


def test_a_refusal_is_not_retried() -> None:
    with json_server(lambda path, body: (401, {"error": "who are you"})) as server:
        endpoint = Endpoint(server.url, pause=lambda seconds: pytest.fail("tried again"))
        with pytest.raises(CareError, match=r"answers 401: .*who are you"):
            endpoint.get("/x")
        endpoint.close()
    assert len(server.requests) == 1


@pytest.mark.parametrize("content", [b"<html>", b"[1]", b"", b"[" * 100_000, b"{}" + b" " * 4096])
def test_an_answer_that_is_not_a_json_object_is_an_error(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    if content.startswith(b"{}"):
        monkeypatch.setattr(models.endpoint, "LARGEST_ANSWER", 4096)
    with json_server(lambda path, body: (200, content)) as server:
        endpoint = Endpoint(server.url)
        with pytest.raises(CareError, match=r"not answer with a JSON object|with more than 4,096 bytes"):
            endpoint.get("/x")
        endpoint.close()


def test_an_answer_that_cannot_be_decompressed_is_retried() -> None:
    with json_server(lambda path, body: (200, b"no gzip"), {"content-encoding": "gzip"}) as server:
        endpoint = Endpoint(server.url, pause=lambda seconds: None)
        with pytest.raises(CareError, match=r"does not answer .DecodingError."):
            endpoint.get("/x")
        assert len(server.requests) == ATTEMPTS
        endpoint.close()


def test_an_endless_answer_is_aborted() -> None:
    ended = threading.Event()

    class Dripping(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while not ended.wait(0.01):
                    self.wfile.write(b" ")

    with serving_http(Dripping) as port:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", timeout_seconds=0.2, attempts=1)
        with pytest.raises(CareError, match=r"does not answer .ReadTimeout."):
            endpoint.get("/x")
        endpoint.close()
        ended.set()


@pytest.mark.parametrize("tokens", ["many", [], -5, 1e400, None, True])
def test_invalid_token_counts_are_ignored(tokens: object) -> None:
    answer = {"choices": [{"message": {"content": "好"}}], "usage": {"prompt_tokens": tokens, "completion_tokens": 3}}
    with json_server(lambda path, body: (200, answer)) as server:
        endpoint = Endpoint(server.url)
        assert chat(endpoint, "m", [], {}) == Completion("好", int(tokens is True), 3)
        endpoint.close()


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint(
            f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.05, pause=lambda seconds: None
        )
        with pytest.raises(CareError, match=r"does not answer .ReadTimeout."):
            endpoint.get("/x")
        endpoint.close()


def test_every_thread_gets_a_connection() -> None:
    callers = 110  # more than httpx opens by default
    together = threading.Barrier(callers)

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            together.wait(60)
            self.answer(200, b"{}")

    with serving_http(Handler) as port, ThreadPoolExecutor(callers) as pool:
        endpoint = Endpoint(f"http://127.0.0.1:{port}", attempts=1)
        assert list(pool.map(endpoint.get, ["/x"] * callers)) == [{}] * callers
        endpoint.close()


def test_an_address_needs_a_scheme() -> None:
    for base in ("127.0.0.1:8000", "http://[bad/v1", "http://127.0.0.1:99999999/v1"):
        with pytest.raises(CareError, match="not an address"):
            Endpoint(base)
