"""Several HTTP workers with an engine each, and failing starts, as an operator sees them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.store.collection import Collection
from tests.api.support import ENCODER, Built, copy_collection
from tests.integration.processes import SERVE, WAIT_SECONDS, Load, Service, assert_unmixed, service, until

BODIES = [
    {"query": "高血压吃什么药"},
    {"query": ["发热", "骨折"], "mode": "dense"},
    {"query": "血糖", "mode": "lexical"},
]
POSTS = {"worker 1", "worker 2"}
RESTARTS = 'care_restarts_total{process="worker"}'


@pytest.fixture(scope="module")
def running(built: Built) -> Iterator[Service]:
    with service(built, CARE_WORKERS="2", CARE_RELOAD_SECONDS="0") as running:
        until(lambda: set(running.children()) == POSTS)
        yield running


def test_a_reload_by_one_worker_reaches_the_other(running: Service, built: Built) -> None:
    with Load(running, BODIES) as load:
        for letter in "ba":
            Collection(built.root).publish(built.versions[letter])
            # The worker that gets the request swaps; the other one may have followed by the next request.
            assert running.send("POST", "/admin/reload").json()["snapshot"] == built.versions[letter]
            until(lambda letter=letter: both_serve(running, built.versions[letter]))
            load.wait_for(200, 6)
    assert load.statuses() == {200}
    assert load.broken == 0
    assert assert_unmixed(load.answers, built) == {"a", "b"}


def both_serve(running: Service, version: str) -> bool:
    served = [running.get("/admin/versions").json()["serving"] for _ in range(6)]
    return set(served) == {version} and running.metric(f'care_snapshot_info{{version="{version}"}}') == 1


def test_a_killed_worker_is_restarted_and_its_counts_are_kept(running: Service) -> None:
    until(lambda: set(running.children()) == POSTS and running.is_ready())
    asked, restarts = running.metric("care_queries_total"), running.metric(RESTARTS)
    old = running.children()["worker 2"]
    os.kill(old, signal.SIGKILL)
    until(lambda: running.children().get("worker 2", old) != old)
    until(lambda: running.metric(RESTARTS) > restarts)
    assert running.metric("care_queries_total") >= asked > 0
    until(running.is_ready)


def test_sigint_ends_every_process_without_a_traceback(running: Service) -> None:
    until(lambda: set(running.children()) == POSTS and running.is_ready())
    children = running.children()
    running.process.send_signal(signal.SIGINT)
    rest, _ = running.process.communicate(timeout=WAIT_SECONDS)
    assert (running.process.returncode, rest) == (0, "")
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())


def start(built: Built, **environment: str) -> subprocess.CompletedProcess[str]:
    """Starts a service that is expected to fail."""
    own = {"CARE_COLLECTION": str(built.root), "CARE_ENCODER": str(ENCODER), "CARE_PORT": "0"}
    return subprocess.run(
        [sys.executable, "-c", SERVE],
        env=os.environ | {"PYTHONPATH": "."} | own | environment,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )


def test_startup_fails_with_the_reason_if_the_snapshot_is_damaged(built: Built, tmp_path: Path) -> None:
    own = copy_collection(built, tmp_path / "collection")
    damaged = own.root / "versions" / own.versions["a"] / "vectors.npy"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (own.root / "CURRENT").write_text(own.versions["a"])
    done = start(own, CARE_ENGINE="process")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert "StartFailed" in last
    assert "vectors.npy" in last


def test_startup_fails_with_the_reason_if_the_engine_cannot_load_its_encoder(built: Built) -> None:
    done = start(built, CARE_DEVICE="cuda")
    assert done.returncode == 1
    assert "model.fp16.onnx" in done.stderr.splitlines()[-1]


def test_a_taken_address_is_reported_before_anything_is_started(built: Built) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        done = start(built, CARE_WORKERS="2", CARE_PORT=str(other.getsockname()[1]))
    assert done.returncode == 1
    assert "CARE_PORT" in done.stderr.splitlines()[-1]
