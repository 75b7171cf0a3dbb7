"""Options of /v1/search: score thresholds, passages, explanations, deadlines, facets, pages and cache bypass."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.engine.jobs import Found, Job, Options, SearchJob
from service.engine.queue import ONLINE_JOBS, Dispatcher, Future
from service.search import searcher
from service.search.results import View
from service.serving.serving import Serving
from tests.api.gate import Gate, block_engine
from tests.api.support import ENTRIES, LONG, Built, copy_collection, make_settings, running

pytestmark = pytest.mark.anyio


async def hits(client: httpx.AsyncClient, **body: object) -> list[dict]:
    response = await client.post("/v1/search", json=body)
    assert response.status_code == 200, response.text
    return response.json()["results"][0]["hits"]


@pytest.mark.parametrize("extra", [{"passages": 1}, {"explain": True}])
async def test_other_requests_are_answered_while_passages_are_written(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, extra: dict
) -> None:
    write, begun, others_done = searcher.result_json, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(serving: Serving, found: Found, options: Options, view: View, *rest: Any) -> bytes:  # noqa: ANN401
        if view.needs_evidence:
            loop.call_soon_threadsafe(begun.set)
            assert others_done.wait(60)
        return write(serving, found, options, view, *rest)

    monkeypatch.setattr(searcher, "result_json", slow)
    async with asyncio.TaskGroup() as group:
        explained = group.create_task(hits(client, query="发热", **extra))
        await begun.wait()
        try:
            assert await hits(client, query="发热")
        finally:
            others_done.set()
    assert extra.keys() <= explained.result()[0].keys()


class Held:
    """Holds every writing of an explanation until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write, self._loop = searcher.result_json, asyncio.get_running_loop()
        self.begun, self.released = asyncio.Semaphore(0), threading.Event()
        self.queries: list[str] = []
        monkeypatch.setattr(searcher, "result_json", self._slow)

    def _slow(self, serving: Serving, found: Found, options: Options, view: View, query: str, *rest: Any) -> bytes:  # noqa: ANN401
        self.queries.append(query)
        self._loop.call_soon_threadsafe(self.begun.release)
        assert self.released.wait(60)
        return self._write(serving, found, options, view, query, *rest)


async def test_the_wait_for_the_thread_that_explains_counts_towards_the_time_limit(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    first = asyncio.create_task(hits(client, query="发热", explain=True))
    await held.begun.acquire()
    try:
        late = await client.post("/v1/search", json={"query": "头痛", "explain": True, "timeout_ms": 300})
    finally:
        held.released.set()
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert await first
    assert held.queries == ["发热"]


async def test_an_explanation_whose_client_left_ends_before_the_next_begins(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    left = asyncio.create_task(client.post("/v1/search", json={"query": "发热", "explain": True}))
    await held.begun.acquire()
    left.cancel()
    await asyncio.wait([left])
    next_one = await client.post("/v1/search", json={"query": "头痛", "explain": True, "timeout_ms": 300})
    begun = list(held.queries)
    held.released.set()
    assert next_one.status_code == 504
    assert begun == ["发热"]
    assert await hits(client, query="骨折", explain=True)
    assert held.queries == ["发热", "骨折"]


@pytest.mark.parametrize(("queries", "bulk"), [(ONLINE_JOBS, False), (ONLINE_JOBS, True), (ONLINE_JOBS + 1, False)])
async def test_many_queries_and_requests_marked_as_bulk_are_bulk(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, queries: int, bulk: bool
) -> None:
    submitted: list[object] = []
    submit = Dispatcher.submit

    def recorded(self: Dispatcher, serving: Serving, jobs: Sequence[Job], **how: Any) -> list[Future]:  # noqa: ANN401
        submitted.append(how["bulk"])
        return submit(self, serving, jobs, **how)

    monkeypatch.setattr(Dispatcher, "submit", recorded)
    texts = [f"发热 {number}" for number in range(queries)]
    await hits(client, query=texts, bulk=bulk, cache=False)
    assert submitted == [bulk or queries > ONLINE_JOBS]


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
async def test_min_score_leaves_out_hits_below_it(client: httpx.AsyncClient, mode: str) -> None:
    everything = await hits(client, query="高血压 发热", mode=mode, top_k=8)
    bound = everything[1]["score"]
    better = await hits(client, query="高血压 发热", mode=mode, top_k=8, min_score=bound)
    assert better == [hit for hit in everything if hit["score"] >= bound]
    assert 2 <= len(better) <= len(everything)
    assert await hits(client, query="高血压 发热", mode=mode, min_score=1e9) == []


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
async def test_passages_of_a_hit_are_sorted_best_first(client: httpx.AsyncClient, mode: str) -> None:
    found = await hits(client, query="头痛 感冒 疲劳", mode=mode, top_k=8, passages=3, fields=["snippet", "text"])
    (long,) = [hit for hit in found if hit["id"] == "a-6"]
    assert len(long["passages"]) == 3
    scores = [passage["score"] for passage in long["passages"]]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(passage["span"]) for passage in long["passages"]}) == 3
    for passage in long["passages"]:
        start, end = passage["span"]
        assert passage["text"] == LONG[start:end]
        assert passage["snippet"].strip("…") in passage["text"]
        marked = {passage["snippet"][a:b] for a, b in passage["highlights"]}
        assert marked & {"头痛", "感冒", "疲劳"}
    others = [hit for hit in found if hit["id"] != "a-6"]
    assert all(len(hit["passages"]) == 1 for hit in others)


async def test_passages_have_the_requested_fields(client: httpx.AsyncClient) -> None:
    (first, *_) = await hits(client, query="骨折", passages=1, fields=["title"])
    assert set(first) == {"id", "score", "title", "passages"}
    assert set(first["passages"][0]) == {"span", "score"}
    assert "passages" not in (await hits(client, query="骨折"))[0]


async def test_in_dense_and_lexical_modes_the_best_passage_has_the_documents_score(client: httpx.AsyncClient) -> None:
    for mode in ("dense", "lexical"):
        for hit in await hits(client, query="头痛", mode=mode, passages=2):
            assert hit["passages"][0]["score"] == hit["score"]


async def test_explain_gives_the_rank_of_each_retriever_alone(client: httpx.AsyncClient) -> None:
    query = "高血压 头痛 asthma"
    alone = {mode: await hits(client, query=query, mode=mode, top_k=8) for mode in ("dense", "lexical")}
    placings = {
        mode: {hit["id"]: {"rank": rank, "score": hit["score"]} for rank, hit in enumerate(found, start=1)}
        for mode, found in alone.items()
    }
    found = await hits(client, query=query, mode="hybrid", top_k=8, explain=True)
    assert len(found) == len(ENTRIES)
    for hit in found:
        for side in ("dense", "lexical"):
            assert hit["explain"][side] == placings[side].get(hit["id"])
    assert len({hit["explain"]["weight"] for hit in found}) == 1
    assert 0 < found[0]["explain"]["weight"] < 1


async def test_explained_scores_add_up(client: httpx.AsyncClient) -> None:
    found = await hits(client, query="高血压 头痛", mode="hybrid", top_k=8, explain=True, weight=0.25)
    dense = [hit["explain"]["dense"]["score"] for hit in found]
    lexical = [hit["explain"]["lexical"]["score"] if hit["explain"]["lexical"] else 0.0 for hit in found]
    for hit, mine, words in zip(found, dense, lexical, strict=True):
        stretched = (mine - min(dense)) / (max(dense) - min(dense))
        assert hit["explain"]["weight"] == 0.25
        assert hit["score"] == pytest.approx(0.25 * stretched + 0.75 * words / max(lexical), abs=1e-4)


@pytest.mark.parametrize(("mode", "fusion", "silent"), [("dense", "scores", "lexical"), ("lexical", "scores", "dense")])
async def test_explain_omits_a_retriever_that_did_not_run(
    client: httpx.AsyncClient, mode: str, fusion: str, silent: str
) -> None:
    for rank, hit in enumerate(await hits(client, query="头痛", mode=mode, fusion=fusion, explain=True), start=1):
        assert hit["explain"][silent] is None
        assert hit["explain"][mode] == {"rank": rank, "score": hit["score"]}
        assert hit["explain"]["weight"] is None


async def test_reciprocal_fusion_has_no_weight(client: httpx.AsyncClient) -> None:
    found = await hits(client, query="高血压", fusion="reciprocal", explain=True)
    assert {hit["explain"]["weight"] for hit in found} == {None}


async def test_explain_does_not_change_the_ranking(client: httpx.AsyncClient) -> None:
    plain = await hits(client, query="发热 头痛", top_k=8)
    explained = await hits(client, query="发热 头痛", top_k=8, explain=True, passages=2)
    extra = ("explain", "passages")
    assert [{name: hit[name] for name in hit if name not in extra} for hit in explained] == plain


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
@pytest.mark.parametrize("filters", [[], [{"not": {"field": "kind", "eq": "test"}}]])
async def test_pages_are_slices_of_one_ranking(client: httpx.AsyncClient, mode: str, filters: list[dict]) -> None:
    asked = {"query": "高血压 发热 头痛 骨折 血常规", "mode": mode, "filters": filters, "explain": True}
    whole = await hits(client, **asked, top_k=100, offset=0)
    assert len(whole) > 4
    pages = [await hits(client, **asked, top_k=2, offset=start) for start in range(0, 10, 2)]
    assert [hit for page in pages for hit in page] == whole
    assert await hits(client, **asked, top_k=2) == whole[:2]
    assert await hits(client, **asked, top_k=50, offset=50) == []


async def test_pages_include_fresh_documents_and_respect_min_score(built: Built, tmp_path: Path) -> None:
    own = copy_collection(built, tmp_path / "collection")
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        fresh = [{"id": f"f-{n}", "title": "发热", "text": f"发热第 {n} 条。"} for n in range(5)]
        assert (await client.post("/v1/documents", json={"documents": fresh})).status_code == 200
        whole = await hits(client, query="发热", offset=0, top_k=100)
        pages = [await hits(client, query="发热", offset=start, top_k=3) for start in range(0, 15, 3)]
        assert [hit for page in pages for hit in page] == whole
        assert len(whole) == len(ENTRIES) + 5
        least = whole[3]["score"]
        expected = [hit for hit in whole if hit["score"] >= least][2:]
        assert await hits(client, query="发热", offset=2, top_k=50, min_score=least) == expected


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
async def test_facets_count_the_best_documents_of_each_query(client: httpx.AsyncClient, mode: str) -> None:
    filters = [{"not": {"field": "kind", "eq": "test"}}]
    asked = {"query": ["头痛 asthma", "骨折 血常规"], "mode": mode, "filters": filters, "fields": ["metadata"]}
    response = await client.post("/v1/search", json=asked | {"top_k": 1, "facets": ["kind", "year"]})
    counted = [result["facets"] for result in response.json()["results"]]
    assert all(len(result["hits"]) == 1 for result in response.json()["results"])
    for facets, result in zip(
        counted, (await client.post("/v1/search", json=asked | {"top_k": 100})).json()["results"], strict=True
    ):
        found = [hit["metadata"] for hit in result["hits"]]
        assert facets == {
            name: dict(sorted(Counter(str(each[name]) for each in found).items(), key=lambda pair: (-pair[1], pair[0])))
            for name in ("kind", "year")
        }
        assert list(facets["kind"].values()) == sorted(facets["kind"].values(), reverse=True)


async def test_facets_leave_out_what_min_score_leaves_out(client: httpx.AsyncClient) -> None:
    found = await hits(client, query="头痛", mode="dense", top_k=8)
    body = {"query": "头痛", "mode": "dense", "min_score": found[2]["score"], "facets": ["kind"], "top_k": 1}
    (result,) = (await client.post("/v1/search", json=body)).json()["results"]
    assert sum(result["facets"]["kind"].values()) == 3


async def test_get_takes_the_same_options(client: httpx.AsyncClient) -> None:
    body = {"query": "头痛", "min_score": 0.1, "passages": 2, "explain": True, "timeout_ms": 60_000, "cache": False}
    query_string = "q=头痛&min_score=0.1&passages=2&explain=true&timeout_ms=60000&cache=false&bulk=true"
    body |= {"offset": 1, "facets": ["kind", "year"]}
    by_get = (await client.get(f"/v1/search?{query_string}&offset=1&facets=kind,year")).json()["results"]
    assert by_get == (await client.post("/v1/search", json=body)).json()["results"]


async def test_a_request_past_its_deadline_gets_504(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0)) as client:
        held = await block_engine(gate, client)
        response = await client.post("/v1/search", json={"query": "发热", "timeout_ms": 50})
        gate.open.set()
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        assert (await held).status_code == 200
    assert "发热" not in gate.queries  # no work is spent on an abandoned query


async def test_a_request_without_a_timeout_gets_that_of_the_settings(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, timeout_ms=300)) as client:
        held = await block_engine(gate, client)
        response = await client.post("/v1/search", json={"query": "发热"})
        gate.open.set()
        await held
        assert response.status_code == 504


async def test_a_request_can_bypass_the_cache(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, lru_mb=1)) as client:
        for cache in (True, True, False, False):
            await hits(client, query="高血压", cache=cache)
        metrics = (await client.get("/metrics")).text
    assert gate.queries.count("高血压") == 3
    assert 'care_cache_total{kind="result",layer="process",outcome="bypass"} 2.0' in metrics


async def test_a_cached_embedding_is_used_for_a_request_with_other_options(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, lru_mb=1)) as client:
        plain = await hits(client, query="高血压", mode="dense", top_k=3)
        assert await hits(client, query="高血压", mode="dense", top_k=2) == plain[:2]
        metrics = (await client.get("/metrics")).text
    jobs = [job for job in gate.jobs if isinstance(job, SearchJob) and job.query == "高血压"]
    assert [job.vector is not None for job in jobs] == [False, True]
    assert 'care_cache_total{kind="embedding",layer="process",outcome="hit"} 1.0' in metrics
