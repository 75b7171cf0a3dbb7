"""The load generator against a small scripted server."""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

import pytest

from loadtest.harness import BenchError, generator
from loadtest.harness.generator import (
    Form,
    Job,
    Measurement,
    drive,
    measure,
    write_requests,
)
from tests.unit.loadtest.tiny_server import BODY, TIMINGS, answer, running


def job(url: str, *, connections: int = 1, seconds: float = 30, max_requests: int = 20, timings: bool = True) -> Job:
    return Job(url, ["头痛", "fever"], "hybrid", connections, seconds, max_requests=max_requests, timings=timings)


def test_requests_cycle_through_the_queries_and_never_repeat() -> None:
    asked = Job("http://127.0.0.1:1", ['"头痛"\\', "fever"], "dense", 1, 1, first_number=7)
    bodies = []
    for request in itertools.islice(write_requests(asked), 4):
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.endswith(b"Content-Length: %d" % len(body))
        bodies.append(json.loads(body))
    queries = ["fever 7", '"头痛"\\ 8', "fever 9", '"头痛"\\ 10']
    assert bodies == [{"query": query, "mode": "dense"} for query in queries]


def test_queries_without_numbers_repeat_unchanged() -> None:
    asked = Job("http://127.0.0.1:1", ["头痛", "fever"], "dense", 1, 1, numbered=False)
    bodies = [request.partition(b"\r\n\r\n")[2] for request in itertools.islice(write_requests(asked), 3)]
    assert [json.loads(body)["query"] for body in bodies] == ["头痛", "fever", "头痛"]


def test_txtai_requests_use_its_own_route() -> None:
    with running(lambda number: [answer(b"[]")]) as server:
        queries = ["头痛 & 发热?", "fever"]
        measured = drive(
            Job(server.url, queries, "dense", 1, 30, first_number=7, max_requests=2, timings=False, form=Form.TXTAI)
        )
    assert (len(measured.latency_ms), measured.failures) == (2, {})
    paths = [urlsplit(line.split(" ")[1]) for line in server.lines]
    assert {(path.path, line.split(" ")[0]) for path, line in zip(paths, server.lines, strict=True)} == {
        ("/search", "GET")
    }
    assert [parse_qs(path.query) for path in paths] == [
        {"limit": ["10"], "query": ["fever 7"]},
        {"limit": ["10"], "query": ["头痛 & 发热? 8"]},
    ]


def test_connections_are_reused_and_the_request_limit_is_respected() -> None:
    with running(lambda number: [answer()]) as server:
        measured = drive(job(server.url, connections=3, max_requests=30))
    assert server.connections == 3
    assert set(server.lines) == {"POST /v1/search HTTP/1.1"}
    assert measured.sent == len(server.bodies) == len(measured.latency_ms) == 30
    assert {body["query"] for body in server.bodies} == {f"{('头痛', 'fever')[n % 2]} {n}" for n in range(30)}
    assert measured.failures == {}
    assert measured.body_bytes == [len(BODY)] * 30
    assert measured.timings_ms == {stage: [value] * 30 for stage, value in TIMINGS.items()}
    assert all(latency > 0 for latency in measured.latency_ms)
    assert measured.requests_per_second == 30 / measured.elapsed_seconds


def test_answers_in_small_pieces_are_joined() -> None:
    with running(lambda number: [bytes([byte]) for byte in answer()]) as server:
        measured = drive(job(server.url, max_requests=3))
    assert (len(measured.latency_ms), measured.failures, server.connections) == (3, {}, 1)


def test_an_error_status_is_a_failure_and_the_connection_goes_on() -> None:
    def respond(number: int) -> list[bytes]:
        return [answer(b"busy", "503 Service Unavailable") if number % 4 == 0 else answer()]

    with running(respond) as server:
        measured = drive(job(server.url, max_requests=20))
    assert measured.failures == {"status 503": 5}
    assert (measured.sent, len(measured.latency_ms), server.connections) == (20, 15, 1)


def test_failures_alone_give_a_measurement() -> None:
    with running(lambda number: [answer(b"", "500 Internal Server Error")]) as server:
        measured = drive(job(server.url, max_requests=4))
    assert (measured.failures, measured.latency_ms) == ({"status 500": 4}, [])
    assert measured.requests_per_second == 0


def test_a_job_ends_after_its_time() -> None:
    with running(lambda number: [answer()]) as server:
        measured = drive(job(server.url, connections=2, seconds=0.1, max_requests=generator.MAX_REQUESTS))
    assert 2 <= measured.sent == len(measured.latency_ms) < generator.MAX_REQUESTS
    assert measured.failures == {}


def test_an_answer_that_never_comes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "DRAIN_SECONDS", 0.1)
    with running(lambda number: [] if number == 5 else [answer()]) as server:
        measured = drive(job(server.url, seconds=2, max_requests=50))
    assert measured.failures == {"no answer": 1}
    assert (measured.sent, len(measured.latency_ms)) == (6, 5)


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        ([answer()[:-5], b""], "connection lost"),
        ([answer() + b"x"], "bad answer"),
        ([answer() + answer()], "bad answer"),
        ([b"SSH-2.0\r\ncontent-length: 0\r\n\r\n"], "bad answer"),
    ],
)
def test_a_broken_connection_is_one_failure_and_others_go_on(pieces: list[bytes], failure: str) -> None:
    with running(lambda number: pieces if number == 0 else [answer()]) as server:
        measured = drive(job(server.url, connections=2, max_requests=10))
    assert measured.failures == {failure: 1}
    assert (measured.sent, len(measured.latency_ms)) == (10, 9)


@pytest.mark.parametrize("body", [b"{}", b'{"timings_ms":{"total":1}}', b'{"timings_ms":7}', b'{"timings_ms":', b""])
def test_an_answer_without_expected_timings_is_a_failure(body: bytes) -> None:
    with running(lambda number: [answer(body)]) as server:
        expected = drive(job(server.url, max_requests=2))
        plain = drive(job(server.url, max_requests=2, timings=False))
    assert (expected.failures, expected.latency_ms) == ({"no timings_ms": 2}, [])
    assert (plain.failures, len(plain.latency_ms), plain.timings_ms) == ({}, 2, {})


def test_the_client_in_its_own_process_measures_the_same() -> None:
    with running(lambda number: [answer()] if number else [answer(b"", "429 Too Many Requests")]) as server:
        measured = measure(job(server.url, max_requests=5))
    assert isinstance(measured, Measurement)
    assert (measured.sent, len(measured.latency_ms), measured.failures) == (5, 4, {"status 429": 1})
    assert measured.timings_ms["encode"] == [2.0] * 4


@pytest.mark.parametrize("run", [drive, measure])
def test_a_missing_service_is_reported_in_one_line(run: Callable[[Job], Measurement]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # without listening, so that no other program takes the port
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(BenchError, match=f"{url} is not reachable .* start the service first$"):
            run(job(url))


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:8000",
        "http://192.0.2.7:8000",
        "http://0.0.0.0:8000",
        "http://127.0.0.1.example.org:80",
        "http://127.0.0.1@192.0.2.7:80",
        "https://127.0.0.1:8000",
        "http://127.0.0.1",
        "http://127.0.0.1:8000/v1/search",
        "http://127.0.0.1:none",
        "http://[127.0.0.1:8000",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:PORT only"):
        job(url)


@pytest.mark.parametrize(
    ("bound", "value"), [("connections", 0), ("connections", 257), ("seconds", 61.0), ("max_requests", 200_001)]
)
def test_a_job_is_bounded(bound: str, value: float) -> None:
    with pytest.raises(BenchError, match=f"^{bound} must be above 0 and at most"):
        job("http://127.0.0.1:8000", **{bound: value})  # type: ignore[arg-type]


def test_a_job_needs_a_query() -> None:
    with pytest.raises(BenchError, match="no query"):
        Job("http://127.0.0.1:8000", [], "hybrid", 1, 1)
