"""/v1/search and /v1/rerank with a cross-encoder: order of scores, time limits, in-process and separate engine."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import numpy as np
import pytest

from models.encoder.onnx import OnnxReranker
from models.encoder.spec import Variant
from models.export.reranker import export_reranker
from service.engine.jobs import Job, Outcome, PairJob, pair_load
from service.engine.local import InProcessEngine
from service.search.embedder import PAIR_TOKENS, PairScores, Reranker, _portions
from service.search.portions import WINDOW, Deadline
from service.serving.serving import Serving
from tests.api.gate import REAL_RUN, WAIT_SECONDS
from tests.api.support import AS_ADMIN, ENCODER, Built, copy_collection, make_settings, running
from tests.api.test_errors import check
from tests.support.tiny_models import write_cross_encoder

pytestmark = pytest.mark.anyio

QUERY = "发热吃什么药"
TEXTS = ["骨折要用夹板固定", "感冒发热", "胃炎", "高血压用药"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("reranker")
    write_cross_encoder(home / "published", "bert", max_position_embeddings=64)
    return export_reranker(home / "published", home / "tiny-reranker", variants=[Variant.FP32]).folder


@pytest.fixture(scope="module")
async def client(built: Built, reranker: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = make_settings(built, threads=1, reload_seconds=0, lru_mb=1, reranker=reranker)
    async with running(settings) as client:
        yield client


async def search(client: httpx.AsyncClient, **body: object) -> dict[str, Any]:
    response = await client.post("/v1/search", json={"query": QUERY, "mode": "dense", "top_k": 8} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected_scores(folder: Path, passages: Sequence[str]) -> list[float]:
    model = OnnxReranker.load(folder, threads=1)
    return [1 / (1 + math.exp(-score)) for score in model.score(model.tokenizer.pairs(QUERY, passages)).tolist()]


async def test_the_first_hits_are_ordered_by_the_reranker(client: httpx.AsyncClient, reranker: Path) -> None:
    plain = (await search(client, passages=20, fields=["title", "text"]))["results"][0]
    answer = await search(client, rerank={"depth": 5}, fields=["title", "text"])
    (result,) = answer["results"]
    hits, known = result["hits"], {hit["id"]: hit for hit in plain["hits"]}
    assert {hit["id"] for hit in hits[:5]} == {hit["id"] for hit in plain["hits"][:5]}
    assert [hit["id"] for hit in hits[5:]] == [hit["id"] for hit in plain["hits"][5:]]
    shown = [hit["rerank_score"] for hit in hits[:5]]
    assert shown == sorted(shown, reverse=True)
    for hit in hits[:5]:
        spans = [passage["span"] for passage in known[hit["id"]]["passages"]]
        # Of a document with several passages, the best one is read.
        own = expected_scores(reranker, [f"{hit['title']}\n{hit['text'][slice(*span)]}" for span in spans])
        assert min(abs(score - hit["rerank_score"]) for score in own) < 1e-3
        assert hit["score"] == known[hit["id"]]["score"]
    assert all("rerank_score" not in hit for hit in hits[5:])
    assert result["rerank"] == {"depth": 5, "scored": 5}
    assert "rerank" not in plain
    assert answer["timings_ms"]["rerank"] > 0


async def test_more_documents_are_reranked_than_shown(client: httpx.AsyncClient) -> None:
    (whole,) = (await search(client, rerank=True))["results"]
    (first,) = (await search(client, rerank=True, top_k=2))["results"]
    assert whole["rerank"] == first["rerank"] == {"depth": 8, "scored": 8}  # the collection has no more
    assert first["hits"] == whole["hits"][:2]
    (paged,) = (await search(client, rerank=True, top_k=2, offset=1))["results"]
    assert [hit["id"] for hit in paged["hits"]] == [hit["id"] for hit in whole["hits"][1:3]]


async def test_several_queries_json_lines_and_get_are_reranked(client: httpx.AsyncClient) -> None:
    queries = [QUERY, "骨折", "头痛"]
    alone = [order_of((await search(client, query=query, rerank=True, cache=False))["results"][0]) for query in queries]
    together = (await search(client, query=queries, rerank=True, cache=False))["results"]
    for result, before in zip(together, alone, strict=True):
        assert_nearly(order_of(result), before)
    body = {"query": queries, "mode": "dense", "top_k": 8, "rerank": True, "cache": False}
    response = await client.post("/v1/search", json=body, headers={"Accept": "application/x-ndjson"})
    for line, before in zip(response.text.splitlines()[:-1], alone, strict=True):
        assert_nearly(order_of(json.loads(line)), before)
    response = await client.get("/v1/search", params={"q": QUERY, "mode": "dense", "top_k": 8, "rerank": "true"})
    assert order_of(response.json()["results"][0]) == alone[0]


def order_of(result: dict[str, Any]) -> list[tuple[str, float]]:
    """Leaves out the scores of the first stage, which in int8 depend a little on the batch."""
    return [(hit["id"], round(hit["rerank_score"], 3)) for hit in result["hits"]]


def assert_nearly(found: list[tuple[str, float]], before: list[tuple[str, float]]) -> None:
    """Allows one document to differ: in a batch, the first stage may choose the other of its two passages."""
    scores, others = dict(found), dict(before)
    assert scores.keys() == others.keys()
    assert sum(scores[key] != others[key] for key in scores) <= 1
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


async def test_a_cached_result_is_not_scored_again(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[Job] = []

    def run(engine: InProcessEngine, serving: Serving, batch: Sequence[Job]) -> list[Outcome]:
        pairs.extend(job for job in batch if isinstance(job, PairJob))
        return REAL_RUN(engine, serving, batch)

    monkeypatch.setattr(InProcessEngine, "run", run)
    first = await search(client, query="白细胞", rerank=True)
    assert len(pairs) == 8
    assert (await search(client, query="白细胞", rerank=True))["results"] == first["results"]
    assert len(pairs) == 8
    await search(client, query="白细胞", rerank={"depth": 3})
    assert len(pairs) == 11


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Makes pairs after the first three wait until the event is set; their time is over soon."""
    open_ = threading.Event()
    seen = 0

    def run(engine: InProcessEngine, serving: Serving, batch: Sequence[Job]) -> list[Outcome]:
        nonlocal seen
        seen += sum(isinstance(job, PairJob) for job in batch)
        if seen > 3:
            assert open_.wait(WAIT_SECONDS)
        return REAL_RUN(engine, serving, batch)

    def seconds_left(deadline: Deadline, ahead: int = 0) -> float:
        return WAIT_SECONDS if seen < 3 or open_.is_set() else 0.1

    monkeypatch.setattr(InProcessEngine, "run", run)
    monkeypatch.setattr(Deadline, "seconds_left", seconds_left)
    yield open_
    open_.set()


async def test_documents_that_are_not_scored_in_time_keep_their_rank(
    built: Built, reranker: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAIR_TOKENS, "cpu", 1)  # one pair at a time
    settings = make_settings(built, threads=1, reload_seconds=0, lru_mb=1, reranker=reranker)
    async with running(settings) as client:
        plain = (await search(client, cache=False))["results"][0]["hits"]
        answer = await search(client, rerank=True)
        (result,) = answer["results"]
        assert result["rerank"] == {"depth": 8, "scored": 3}
        assert sorted(hit["id"] for hit in result["hits"][:3]) == sorted(hit["id"] for hit in plain[:3])
        assert result["hits"][3:] == plain[3:]
        slow.set()
        # A partial result was not cached.
        assert (await search(client, rerank=True))["results"][0]["rerank"] == {"depth": 8, "scored": 8}
        metrics = (await client.get("/metrics")).text
        assert 'care_rerank_total{outcome="partial"} 1.0' in metrics
        assert 'care_rerank_total{outcome="complete"} 1.0' in metrics
        assert 'care_stage_seconds_count{stage="rerank"} 2.0' in metrics


@pytest.mark.parametrize("queries", [2, WINDOW + 1])
async def test_every_query_is_ranked_before_reranking_uses_up_the_time(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    async def slow(
        self: Reranker, serving: Serving, query: str, documents: Sequence[str], *, deadline: Deadline, **options: bool
    ) -> PairScores:
        deadline._end = perf_counter()
        return PairScores(np.full(len(documents), np.nan, np.float32), 0)

    monkeypatch.setattr(Reranker, "score", slow)
    texts = [f"{QUERY}{number}" for number in range(queries)]
    answer = await search(client, query=texts, rerank={"depth": 1}, top_k=1, timeout_ms=60_000, cache=False)
    assert [result["rerank"]["scored"] for result in answer["results"]] == [0] * queries


async def test_no_text_is_read_for_the_reranker_after_the_deadline(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    score = Reranker.score

    async def late(
        self: Reranker, serving: Serving, query: str, documents: Sequence[str], *, deadline: Deadline, bulk: bool,
        partial: bool,
    ) -> PairScores:  # fmt: skip
        asked.append(query)
        scored = await score(self, serving, query, documents, deadline=deadline, bulk=bulk, partial=partial)
        deadline._end = perf_counter()
        return scored

    monkeypatch.setattr(Reranker, "score", late)
    queries = ["发热", "咳嗽", "头痛"]
    answer = await search(client, query=queries, rerank={"depth": 5}, timeout_ms=60_000, cache=False)
    assert asked == ["发热"]
    assert [result["rerank"]["scored"] for result in answer["results"]] == [5, 0, 0]


async def test_without_a_reranker_the_request_is_refused_with_the_remedy(built: Built) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0)) as client:
        response = await client.post("/v1/search", json={"query": QUERY, "rerank": {"depth": 20}})
        assert "CARE_RERANKER" in check(response, 422, "invalid_request", "rerank")
        response = await client.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS})
        assert response.json()["model"] == ENCODER.name


async def test_depths_are_bounded(client: httpx.AsyncClient) -> None:
    for depth, words in ((0, "greater than or equal to 1"), (101, "at most 100"), (2000, "less than or equal to 1000")):
        response = await client.post("/v1/search", json={"query": QUERY, "rerank": {"depth": depth}})
        assert words in check(response, 422, "invalid_request", "rerank")


async def test_rerank_uses_the_reranker_or_the_named_model(client: httpx.AsyncClient, reranker: Path) -> None:
    response = await client.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS, "top_n": 3})
    answer = response.json()
    assert answer["model"] == reranker.name
    scores = expected_scores(reranker, TEXTS)
    best = np.argsort(-np.array(scores)).tolist()[:3]
    assert [result["index"] for result in answer["results"]] == best
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
        [scores[index] for index in best], abs=1e-3
    )
    assert answer["usage"]["total_tokens"] > 0
    by_vectors = await client.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS, "model": ENCODER.name})
    assert by_vectors.json()["model"] == ENCODER.name
    models = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == [ENCODER.name, reranker.name]
    assert (await client.get(f"/v1/models/{reranker.name}")).status_code == 200
    wrong = await client.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS, "model": "gpt"})
    assert reranker.name in check(wrong, 404, "not_found")


async def test_the_engine_process_reranks_like_the_in_process_engine(
    client: httpx.AsyncClient, built: Built, reranker: Path, tmp_path: Path
) -> None:
    from tests.integration.processes import service

    expected = (await search(client, rerank=True, cache=False))["results"]
    own = copy_collection(built, tmp_path / "own")
    with service(own, CARE_RERANKER=str(reranker), CARE_ENGINE="process") as there:
        answer = there.search({"query": QUERY, "mode": "dense", "top_k": 8, "rerank": True})
        assert answer.status == 200, answer.text
        found = json.loads(answer.text)["results"]
    assert [hit["id"] for hit in found[0]["hits"]] == [hit["id"] for hit in expected[0]["hits"]]
    assert found[0]["rerank"] == {"depth": 8, "scored": 8}
    assert found[0]["hits"][0]["rerank_score"] == pytest.approx(expected[0]["hits"][0]["rerank_score"], abs=1e-3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reranker with other weights and a tokenizer that splits pairs differently."""
    home = tmp_path_factory.mktemp("other")
    write_cross_encoder(home / "published", "xlm-roberta", max_position_embeddings=40)
    return export_reranker(home / "published", home / "other-reranker", variants=[Variant.FP32]).folder


def replace(folder: Path, by: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(by, folder)


async def test_a_reload_loads_the_current_reranker_of_the_folder(
    built: Built, reranker: Path, other: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(reranker, tmp_path / "own")
    settings = make_settings(built, threads=1, reload_seconds=0, lru_mb=1, reranker=own)
    asked = {"query": QUERY, "documents": TEXTS}
    async with running(settings) as client:
        before = await search(client, rerank=True)
        replace(own, other)
        assert (await search(client, rerank=True))["results"] == before["results"], "the new reranker needs a reload"
        assert (await client.post("/admin/reload", headers=AS_ADMIN)).json()["changed"]
        assert (await search(client, rerank=True))["results"] != before["results"], "no earlier answer is cached"
        found = (await client.post("/v1/rerank", json=asked)).json()["results"]
    assert_scored_by(other, found)


def assert_scored_by(folder: Path, found: list[dict[str, Any]]) -> None:
    shown = {result["index"]: result["relevance_score"] for result in found}
    assert [shown[index] for index in range(len(TEXTS))] == pytest.approx(expected_scores(folder, TEXTS), abs=1e-3)


async def test_workers_reload_the_reranker_of_a_restarted_engine(
    built: Built, reranker: Path, other: Path, tmp_path: Path
) -> None:
    from tests.integration.processes import service, until

    folder = shutil.copytree(reranker, tmp_path / "own")
    asked = {"query": QUERY, "documents": TEXTS}
    with service(copy_collection(built, tmp_path / "copy"), CARE_RERANKER=str(folder), CARE_ENGINE="process") as there:
        assert_scored_by(reranker, there.send("POST", "/v1/rerank", asked).json()["results"])
        replace(folder, other)
        os.kill(there.children()["engine"], signal.SIGKILL)
        until(lambda: there.metric('care_restarts_total{process="engine"}') == 1 and there.is_ready())
        answer = there.send("POST", "/v1/rerank", asked)
        assert answer.status == 200, answer.text
        assert_scored_by(other, answer.json()["results"])


def test_portions_keep_the_order_and_the_limit() -> None:
    assert list(_portions([10, 20, 30, 5, 100, 1], 50)) == [range(2), range(2, 4), range(4, 5), range(5, 6)]
    assert list(_portions([], 50)) == []
    assert [pair_load(tokens) for tokens in (1, 32, 33, 320)] == [1, 1, 2, 10]
