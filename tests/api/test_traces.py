"""Traces as a collector gets them: a real service sends OTLP over HTTP to a receiver, which decodes it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

from models.encoder.onnx import OnnxEncoder
from service.http.app import create_app
from service.metrics import ACCESS_LOGGER
from service.processes.startup import configure_logging
from service.settings import Settings
from service.traces import MOST_AT_ONCE, MOST_WAITING, Traced, Traces
from tests.api.live import live
from tests.api.support import AS_ADMIN, Built, build_collection, make_settings
from tests.integration.processes import until
from tests.support.http_thread import QuietHandler, serving_http

QUERY = "高血压吃什么药"
STAGES = ["tokenize", "queue", "encode", "search", "fetch"]
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, encoder: OnnxEncoder) -> Built:
    return build_collection(tmp_path_factory.mktemp("traces") / "collection", encoder, letters="a")


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[ResourceSpans]]]:
    """Yields the address of an OTLP receiver, and the spans that it got."""
    received: list[ResourceSpans] = []
    lock = threading.Lock()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
            with lock:
                received.extend(ExportTraceServiceRequest.FromString(self.body()).resource_spans)
            self.answer(status)

    with serving_http(Handler) as port:
        yield f"http://127.0.0.1:{port}", received


def spans_of(received: list[ResourceSpans]) -> list[Span]:
    return [span for resource in received for scope in resource.scope_spans for span in scope.spans]


def facts(attributes: list[KeyValue]) -> dict[str, str | int]:
    return {one.key: one.value.string_value or one.value.int_value for one in attributes}


def searches(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.name == "POST /v1/search"]


def search(address: str, query: str | list[str] = QUERY, **headers: str) -> httpx.Response:
    answer = httpx.post(f"{address}/v1/search", json={"query": query, "top_k": 3}, headers=headers, timeout=60)
    assert answer.status_code == 200
    return answer


def test_a_search_is_one_span_with_a_child_for_each_stage(built: Built) -> None:
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url)) as address:
            answer = search(address, **{"x-request-id": "my-request"})
        (resource,) = received
        assert facts(list(resource.resource.attributes))["service.name"] == "care-search"
        spans = spans_of(received)
    (whole,) = searches(spans)
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert facts(list(whole.attributes)) == {
        "http.request.method": "POST",
        "http.route": "/v1/search",
        "http.response.status_code": 200,
        "care.request_id": answer.headers["x-request-id"],
        "gen_ai.operation.name": "retrieval",
        "gen_ai.data_source.id": "collection",
        "gen_ai.retrieval.top_k": 3,
        "care.queries": 1,
    }
    children = [span for span in spans if span.parent_span_id == whole.span_id]
    assert [span.name for span in children] == STAGES
    assert {span.trace_id for span in children} == {whole.trace_id}
    assert whole.start_time_unix_nano <= children[0].start_time_unix_nano
    for before, after in pairwise(children):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert children[-1].end_time_unix_nano <= whole.end_time_unix_nano
    timings = answer.json()["timings_ms"]
    for span in children:
        took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
        assert took_ms == pytest.approx(timings[span.name], abs=0.002)
    assert QUERY.encode() not in b"".join(span.SerializeToString() for span in spans)


def test_a_cached_result_has_no_stages(built: Built) -> None:
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url, lru_mb=8)) as address:
            search(address)
            search(address)
        spans = spans_of(received)
    first, second = searches(spans)
    assert [span.name for span in spans if span.parent_span_id == first.span_id] == STAGES
    assert not [span for span in spans if span.parent_span_id == second.span_id]


def test_a_trace_of_the_caller_is_continued_and_an_unsampled_caller_is_not_traced(built: Built) -> None:
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url, traces_share=0)) as address:
            search(address)
            search(address, traceparent=f"00-{TRACE}-{CALLER}-00")
            search(address, traceparent=f"00-{TRACE}-{CALLER}-01")
            search(address, traceparent=f"00-{'0' * 32}-{CALLER}-01")  # invalid, so ignored
        (whole,) = searches(spans_of(received))
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, CALLER)


def test_a_span_has_the_request_id_however_long_it_is(built: Built) -> None:
    ids = ["7", "my-request", "r" * 64]
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url, traces_queries=True)) as address:
            for each in ids:
                search(address, **{"x-request-id": each})
        found = searches(spans_of(received))
    assert [facts(list(span.attributes))["care.request_id"] for span in found] == ids
    assert {facts(list(span.attributes))["gen_ai.retrieval.query.text"] for span in found} == {QUERY}


def test_the_log_names_the_trace_and_the_request(built: Built, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url, access_log=True)) as address:
            answer = search(address, traceparent=f"00-{TRACE}-{CALLER}-01")
            search(address)
        _, other = searches(spans_of(received))
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == ACCESS_LOGGER]
    line, second = [line for line in lines if line["route"] == "/v1/search"]
    assert (line["trace_id"], line["request_id"]) == (TRACE, answer.headers["x-request-id"])
    assert second["trace_id"] == other.trace_id.hex()


def test_spans_without_an_access_log_have_their_own_trace_and_request_time(built: Built) -> None:
    began = time.time_ns()
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url, access_log=False)) as address:
            search(address)
            search(address)
            ended = time.time_ns()
        found = searches(spans_of(received))
    assert len({span.trace_id for span in found if any(span.trace_id)}) == 2
    slack = 50_000_000  # the clock that is read at sending may have been corrected since
    for span in found:
        assert began - slack < span.start_time_unix_nano < span.end_time_unix_nano < ended + slack


def test_queries_are_in_a_trace_only_if_the_setting_is_on(built: Built) -> None:
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url, traces_queries=True)) as address:
            search(address, [QUERY, "骨折"])
        (whole,) = searches(spans_of(received))
    assert facts(list(whole.attributes))["gen_ai.retrieval.query.text"] == f"{QUERY}\n骨折"


def test_a_refused_request_has_its_status_and_no_stages(built: Built) -> None:
    with collector() as (url, received):
        with live(make_settings(built, traces_url=url)) as address:
            refused = httpx.post(f"{address}/v1/search", json={"query": QUERY, "top_k": 0}, timeout=60)
            assert refused.status_code == 422
        spans = spans_of(received)
    (whole,) = searches(spans)
    assert facts(list(whole.attributes))["http.response.status_code"] == 422
    assert not [span for span in spans if span.parent_span_id == whole.span_id]


def test_huge_numbers_in_a_refused_request_do_not_stop_later_traces(built: Built) -> None:
    with collector() as (url, received), live(make_settings(built, traces_url=url)) as address:
        refused = httpx.post(f"{address}/v1/search", json={"query": QUERY, "top_k": 10**24}, timeout=60)
        assert refused.status_code == 422
        until(lambda: len(searches(spans_of(received))) == 1)
        search(address)
        until(lambda: len(searches(spans_of(received))) == 2)


def test_a_batch_that_cannot_be_serialised_does_not_lose_later_batches(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [True]

    def spans(self: Traces, traced: Traced) -> bytes:
        if failing:
            failing.clear()
            raise ValueError("an unforeseen value")
        return written(self, traced)

    written = Traces._spans
    monkeypatch.setattr(Traces, "_spans", spans)
    with collector() as (url, received), live(make_settings(built, traces_url=url)) as address:
        search(address)
        until(lambda: not failing)
        search(address)
        until(lambda: len(searches(spans_of(received))) == 1)


@pytest.mark.parametrize("away", [True, False])
def test_an_unreachable_or_refusing_collector_loses_traces_but_no_answer(built: Built, away: bool) -> None:
    unreachable = "http://127.0.0.1:9"
    with collector(503) as (url, _), live(make_settings(built, traces_url=unreachable if away else url)) as address:
        search(address)
        none = 'care_traces_total{outcome="dropped"} 0.0'
        until(lambda: none not in httpx.get(f"{address}/metrics", headers=AS_ADMIN, timeout=60).text)
        search(address)


@pytest.mark.parametrize("away", [True, False])
def test_the_log_names_the_collector_without_its_password(
    built: Built, caplog: pytest.LogCaptureFixture, away: bool
) -> None:
    with collector(503) as (url, _):
        place = "127.0.0.1:9" if away else url.removeprefix("http://")
        with live(make_settings(built, traces_url=f"http://user:s3cret@{place}")) as address:
            search(address)
            until(lambda: "traces are dropped" in caplog.text)
    assert place in caplog.text
    assert ("ConnectError" if away else "status 503") in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("level", ["info", "debug"])
def test_calls_to_the_collector_are_not_logged_with_their_url(
    built: Built, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    for client in ("httpx", "httpcore"):
        caplog.set_level(logging.NOTSET, client)  # as in a new process; the level is put back after the test
    caplog.set_level(logging.DEBUG)
    with collector() as (url, received):
        settings = make_settings(built, traces_url=url.replace("//", "//user:s3cret@"), log_level=level)
        configure_logging(settings)
        with live(settings) as address:
            search(address)
            until(lambda: len(searches(spans_of(received))) == 1)
    assert "s3cret" not in caplog.text


def test_traces_that_cannot_be_sent_in_time_are_dropped_oldest_first(built: Built) -> None:
    settings = make_settings(built, traces_url="http://127.0.0.1:9")
    metrics = create_app(settings.model_copy(update={"traces_url": None})).state.frame.metrics
    traces = Traces(settings, metrics)
    for number in range(MOST_WAITING + 3):
        traces.add(None, "GET", "/livez", str(number), 200, 1.0, 0.001, None, None)
    assert 'care_traces_total{outcome="dropped"} 3.0' in metrics.expose().decode()


def test_requests_during_a_send_are_traced_in_the_next_send(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(built, traces_url="http://127.0.0.1:9")
    traces = Traces(settings, create_app(settings.model_copy(update={"traces_url": None})).state.frame.metrics)
    posts: list[bytes] = []

    def post(url: str, *, content: bytes, headers: dict[str, str]) -> httpx.Response:
        posts.append(content)
        assert len(posts) < 9, "the sending never ends"
        traces.add(None, "GET", "/livez", f"during-{len(posts)}", 200, 1.0, 0.001, None, None)
        return httpx.Response(200, request=httpx.Request("POST", url))

    monkeypatch.setattr(traces._client, "post", post)
    for number in range(MOST_AT_ONCE + 1):
        traces.add(None, "GET", "/livez", f"before-{number}", 200, 1.0, 0.001, None, None)
    traces._send()
    assert [b"during" in content for content in posts] == [False, False]
    traces._send()
    assert posts[2].count(b"during") == 2


def test_without_a_collector_no_tracing_module_is_loaded() -> None:
    code = (
        "from service.http.app import create_app; from service.settings import Settings; import sys;"
        "create_app(Settings()); print([name for name in sys.modules if name.startswith("
        "('opentelemetry.proto', 'opentelemetry.sdk', 'google.protobuf', 'httpx', 'service.traces'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert found.stdout.strip() == "[]"


def test_metrics_of_the_build_and_of_requests_exist_before_the_first_request() -> None:
    text = create_app(Settings()).state.frame.metrics.expose().decode()
    counts = "care_requests_in_flight", "care_tokens_total", "care_card_memory_bytes", "care_card_memory_used_bytes"
    assert 'care_build_info{python="' in text
    assert [name for name in counts if f"\n{name} 0.0\n" not in text] == []
