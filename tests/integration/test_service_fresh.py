"""Documents posted to a service of several processes: every worker sees them, and killed processes lose none."""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from tests.api.pair import build_shifted
from tests.api.support import ENCODER, ENTRIES, Built, copy_collection
from tests.integration.processes import Service, service, until

POSTS = {"engine", "worker 1", "worker 2"}
APART = {"CARE_WORKERS": "2", "CARE_ENGINE": "process"}
# Enough connections that each of two workers almost surely answers one; the tests hold in either case.
ASKED = 8


@pytest.fixture(scope="module")
def running(built: Built) -> Iterator[Service]:
    with service(built, **APART) as running:
        until(lambda: set(running.children()) == POSTS and running.is_ready())
        yield running


def post(running: Service, *names: str) -> int:
    """Posts documents; returns the position once the service has acknowledged them."""
    documents = [{"id": name, "title": f"缬沙坦召回 {name}", "text": "缬沙坦片召回。"} for name in names]
    reply = running.send("POST", "/v1/documents", {"documents": documents})
    assert reply.status == 200, reply.text
    position: int = reply.json()["position"]
    return position


def found(running: Service, mode: str = "hybrid", top_k: int = 100) -> set[str]:
    reply = running.search({"query": "缬沙坦召回", "mode": mode, "top_k": top_k})
    return {hit["id"] for hit in reply.json()["results"][0]["hits"]} if reply.status == 200 else set()


def every_worker(running: Service, condition: str, there: bool) -> bool:
    return all((condition in found(running, mode)) is there for mode in ("dense", "lexical", "hybrid") * ASKED)


def test_posts_and_deletions_at_one_worker_reach_every_worker(running: Service) -> None:
    post(running, "n-1", "n-2")
    until(lambda: every_worker(running, "n-1", there=True))
    assert running.metric("care_fresh_changes") >= 2
    running.send("DELETE", "/v1/documents/n-1")
    until(lambda: every_worker(running, "n-1", there=False))
    assert "n-2" in found(running)


def test_a_change_is_checked_against_a_recent_change_at_another_worker(running: Service) -> None:
    for number in range(ASKED):
        post(running, f"quick-{number}")
        reply = running.send("DELETE", f"/v1/documents/quick-{number}").json()
        assert reply["changed"] == 1


def test_a_filter_on_a_field_of_fresh_documents_only_works_with_an_engine_process(running: Service) -> None:
    document = {"id": "regional", "text": "缬沙坦", "metadata": {"region": "华北"}}
    assert running.send("POST", "/v1/documents", {"documents": [document]}).status == 200
    body = {"query": "缬沙坦", "filters": [{"field": "region", "eq": "华北"}]}

    def only_that(mode: str) -> bool:
        reply = running.search(body | {"mode": mode})
        return reply.status == 200 and [hit["id"] for hit in reply.json()["results"][0]["hits"]] == ["regional"]

    until(lambda: all(only_that(mode) for mode in ("dense", "lexical", "hybrid") * ASKED))
    first_aid = {"field": "kind", "eq": "first-aid"}
    for filters, expected in (
        ([{"any": [{"field": "region", "eq": "华北"}, first_aid]}], {"regional", "a-4", "a-5"}),
        ([{"not": {"field": "region", "eq": "华北"}}, first_aid], {"a-4", "a-5"}),
        ([{"not": {"any": [{"not": first_aid}, {"field": "year", "lt": 2025}]}}], {"a-4"}),
    ):
        asked = {"query": "缬沙坦 骨折 心肺复苏", "top_k": 1, "filters": filters, "facets": ["kind"]}
        for mode in ("dense", "lexical", "hybrid") * ASKED:
            pages = [running.search(asked | {"mode": mode, "offset": n}).json()["results"][0] for n in range(4)]
            assert {hit["id"] for page in pages for hit in page["hits"]} == expected
            assert [len(page["hits"]) for page in pages] == [n < len(expected) for n in range(4)]
            counts = {"first-aid": len(expected - {"regional"})}
            assert all(page["facets"] == {"kind": counts} for page in pages)


def test_a_restarted_worker_and_engine_have_all_documents(running: Service) -> None:
    post(running, "kept")
    for name in ("worker 1", "engine"):
        old = running.children()[name]
        os.kill(old, signal.SIGKILL)
        until(lambda old=old: old not in running.children().values() and set(running.children()) == POSTS)
        until(running.is_ready)
    until(lambda: every_worker(running, "kept", there=True))


def test_a_swap_and_a_rollback_keep_fresh_documents(running: Service, built: Built) -> None:
    post(running, "swapped")
    for letter in "ba":
        Collection(built.root).publish(built.versions[letter])
        running.send("POST", "/admin/reload")
        until(lambda letter=letter: f"{letter}-1" in found(running, "dense"))
        until(lambda: every_worker(running, "swapped", there=True))


def test_acknowledged_documents_survive_a_kill_at_any_moment(built: Built, tmp_path: Path) -> None:
    own = copy_collection(built, tmp_path / "collection")
    acknowledged: list[str] = []

    def keep_posting(running: Service) -> None:
        for number in range(10_000):
            try:
                post(running, f"k-{number}")
            except (OSError, http.client.HTTPException):
                return  # killed
            acknowledged.append(f"k-{number}")

    with service(own, CARE_WORKERS="1", CARE_ENGINE="auto") as running:
        posting = threading.Thread(target=keep_posting, args=[running])
        posting.start()
        try:
            until(lambda: len(acknowledged) >= 5)
        finally:
            running.process.kill()
            posting.join()
    with service(own, CARE_WORKERS="1", CARE_ENGINE="auto") as running:
        assert len(acknowledged) >= 5
        for name in acknowledged:
            assert running.get(f"/v1/documents/{name}").status == 200
        assert set(acknowledged) <= found(running, "lexical")


def test_workers_beside_an_engine_correct_vectors_of_another_encoder(tmp_path: Path) -> None:
    encoder = OnnxEncoder.load(ENCODER, threads=1)
    with service(build_shifted(tmp_path, encoder, encoder), **APART) as running:
        until(lambda: set(running.children()) == POSTS and running.is_ready())
        copies = [{"id": f"copy-{each['id']}", "title": each["title"], "text": each["text"]} for each in ENTRIES]
        assert running.send("POST", "/v1/documents", {"documents": copies}).status == 200
        scores: dict[str, float] = {}

        def is_there() -> bool:
            """Searches; any worker may answer, and one may be behind."""
            reply = running.search({"query": "高血压吃什么药", "mode": "dense", "top_k": 100})
            scores.update({hit["id"]: hit["score"] for hit in reply.json()["results"][0]["hits"]})
            return "copy-1" in scores

        until(is_there)
        for entry in ENTRIES:
            assert scores[f"copy-{entry['id']}"] == pytest.approx(scores[entry["id"]], abs=0.03)
