"""Workers and an engine process, killed, stopped or replaced under load: no hang, no wrong answer, full recovery."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.store.collection import Collection
from tests.api.support import Built
from tests.integration.processes import WAIT_SECONDS, Load, Service, assert_unmixed, service, until

BODIES = [
    {"query": "高血压吃什么药", "mode": "dense"},
    {"query": ["发热", "骨折", "头痛"], "mode": "hybrid", "fields": ["title"]},
    {"query": "血糖", "mode": "lexical"},
    {"query": "心肺复苏", "filters": [{"field": "kind", "eq": "first-aid"}]},
]
POSTS = {"engine", "worker 1", "worker 2"}


@pytest.fixture(scope="module")
def shared(built: Built) -> Iterator[Service]:
    own = {"CARE_ENGINE": "process", "CARE_WORKERS": "2", "CARE_WATCHDOG_SECONDS": "8", "CARE_RELOAD_SECONDS": "0"}
    with service(built, **own) as running:
        yield running


@pytest.fixture
def running(shared: Service) -> Service:
    """Yields the service with all processes running and a query answered, whatever the last test did to it."""
    until(lambda: set(shared.children()) == POSTS and all(shared.is_ready() for _ in range(4)))
    return shared


def kill(running: Service, post: str) -> int:
    pid = running.children()[post]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_worker_loads_no_encoder_and_uses_little_memory(running: Service) -> None:
    children = running.children()
    for post, pid in children.items():
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert ("onnxruntime" in maps) == (post == "engine")
    assert max(running.memory_mb(children[post]) for post in POSTS - {"engine"}) < 150


def test_metrics_add_up_all_processes(running: Service) -> None:
    counted = 'care_requests_total{route="/v1/search",status="200"}'
    before, batches = running.metric(counted), running.metric("care_batch_size_count")
    for number in range(12):
        assert running.get("/v1/search", q=f"头痛{number}", mode="dense").status == 200
    for _ in range(4):  # either worker may answer; a request is counted when its answer was sent
        until(lambda: running.metric(counted) == before + 12)
    assert running.metric("care_batch_size_count") >= batches + 12
    until(lambda: running.metric("care_queue_length") == 0)


def test_a_killed_engine_is_replaced_and_requests_are_refused_meanwhile(running: Service, built: Built) -> None:
    restarts = running.metric('care_restarts_total{process="engine"}')
    with Load(running, BODIES) as load:
        load.wait_for(200, 8)
        old = kill(running, "engine")
        load.wait_for(503)
        load.wait_for(200, 8)
    assert load.statuses() == {200, 503}
    assert load.broken == 0
    codes = {answer.json()["error"]["code"] for answer in load.answers if answer.status == 503}
    assert codes <= {"engine_away", "engine_failed"}
    assert all(answer.headers["retry-after"] == "1" for answer in load.answers if answer.status == 503)
    assert assert_unmixed(load.answers, built) == {"a"}
    assert running.children()["engine"] != old
    assert running.metric('care_restarts_total{process="engine"}') == restarts + 1


def test_without_an_engine_no_worker_is_ready(running: Service) -> None:
    os.kill(running.process.pid, signal.SIGSTOP)  # the supervisor must not start another
    try:
        kill(running, "engine")
        until(lambda: not running.is_ready())
        for _ in range(4):
            for path in ("/readyz", "/v1/search?q=fever", "/v1/search?q=fever&mode=lexical"):
                answer = running.get(path)
                assert answer.status == 503
                assert answer.json()["error"]["code"] == "engine_away"
            assert running.get("/livez").status == 200
    finally:
        os.kill(running.process.pid, signal.SIGCONT)
    until(running.is_ready)


def test_a_killed_worker_is_replaced_while_the_other_serves(running: Service, built: Built) -> None:
    restarts = running.metric('care_restarts_total{process="worker"}')
    with Load(running, BODIES) as load:
        load.wait_for(200, 8)
        old = kill(running, "worker 1")
        load.wait_for(200, 8)
        until(lambda: running.children().get("worker 1", old) != old)
        until(lambda: running.metric('care_restarts_total{process="worker"}') == restarts + 1)
        load.wait_for(200, 8)
    assert load.statuses() == {200}
    assert load.broken <= 3  # those whose connection the worker held
    assert assert_unmixed(load.answers, built) == {"a"}


def test_a_hanging_engine_is_noticed_and_replaced(running: Service, built: Built) -> None:
    old = running.children()["engine"]
    bodies = [body | {"timeout_ms": 2000} for body in BODIES]
    with Load(running, bodies) as load:
        load.wait_for(200, 4)
        os.kill(old, signal.SIGSTOP)
        load.wait_for(504)
        until(lambda: running.children().get("engine", old) != old)
        until(running.is_ready)
        load.wait_for(200, 8)
    assert load.statuses() <= {200, 429, 503, 504}
    assert load.broken == 0
    assert assert_unmixed(load.answers, built) == {"a"}


def test_swaps_reach_every_worker_and_no_answer_mixes_versions(running: Service, built: Built) -> None:
    with Load(running, BODIES) as load:
        for letter in "bababa":
            Collection(built.root).publish(built.versions[letter])
            answer = running.send("POST", "/admin/reload")
            assert answer.json() == {"snapshot": built.versions[letter], "changed": True}
            # No worker polls the pointer here: the other one was notified.
            until(lambda letter=letter: serves(running, built.versions[letter]))
            load.wait_for(200, 8)
    assert load.statuses() == {200}
    assert load.broken == 0
    assert assert_unmixed(load.answers, built) == {"a", "b"}
    rolled = running.send("POST", f"/admin/rollback?version={built.versions['b']}")
    assert rolled.json() == {"snapshot": built.versions["b"], "changed": True}
    until(lambda: serves(running, built.versions["b"]))
    running.send("POST", f"/admin/rollback?version={built.versions['a']}")
    until(lambda: serves(running, built.versions["a"]))


def serves(running: Service, version: str) -> bool:
    """Returns whether the metrics of all workers name only this version."""
    series = re.findall(r'^care_snapshot_info{version="(\S+)"} (\S+)$', running.get("/metrics").text, re.MULTILINE)
    return [name for name, value in series if float(value)] == [version]


def test_terminating_finishes_the_accepted_requests(built: Built) -> None:
    with service(built, CARE_ENGINE="process", CARE_WORKERS="2", CARE_SHUTDOWN_SECONDS="120") as running:
        until(lambda: set(running.children()) == POSTS)
        bodies = [{"query": [f"{number} 头痛{text}" * 10 for text in range(40)]} for number in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(running.search, body) for body in bodies]
            # More than three of the four wait: all have been accepted.
            until(lambda: running.metric("care_queue_length") > 120 or all(answer.done() for answer in answers))
            running.process.send_signal(signal.SIGTERM)
            statuses = [answer.result().status for answer in answers]
        rest, errors = running.process.communicate(timeout=WAIT_SECONDS)
        assert statuses == [200] * 4
        assert all(len(answer.result().json()["results"]) == 40 for answer in answers)
        assert (running.process.returncode, rest, errors) == (0, "", "")
