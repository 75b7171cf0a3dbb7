"""Posting documents to and deleting them from a running service, over HTTP."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from indexer.build import BuildOptions, build
from indexer.encode import Encoder, encode_here
from indexer.store import fresh_log
from indexer.store.collection import Collection
from indexer.store.fresh_log import Change, Deleted, Posted
from indexer.store.shards import Shards
from models.encoder.onnx import OnnxEncoder
from service.http.app import create_app
from tests.api.support import LONG, Built, client_of, copy_collection, make_settings, running

pytestmark = pytest.mark.anyio

NOTICE = {
    "id": "notice-1",
    "title": "缬沙坦批次召回",
    "text": "因检出杂质，部分批次的缬沙坦片自即日起召回。",
    "metadata": {"kind": "notice", "year": 2026, "region": "华北"},
}


@pytest.fixture
def own(built: Built, tmp_path: Path) -> Built:
    return copy_collection(built, tmp_path / "collection")


@pytest.fixture
async def client(own: Built) -> AsyncIterator[httpx.AsyncClient]:
    async with running(make_settings(own, threads=1, reload_seconds=0, lru_mb=8)) as client:
        yield client


async def post(client: httpx.AsyncClient, *documents: dict[str, Any]) -> httpx.Response:
    return await client.post("/v1/documents", json={"documents": list(documents)})


async def hits(client: httpx.AsyncClient, query: str, **options: object) -> list[dict[str, Any]]:
    response = await client.post("/v1/search", json={"query": query, **options})
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["results"][0]["hits"]
    return found


async def ids(client: httpx.AsyncClient, query: str, **options: object) -> list[str]:
    return [hit["id"] for hit in await hits(client, query, **options)]


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
async def test_a_posted_document_is_found_in_every_mode(client: httpx.AsyncClient, mode: str) -> None:
    assert "notice-1" not in await ids(client, "缬沙坦召回", mode=mode)
    answer = (await post(client, NOTICE)).json()
    assert (answer["position"], answer["changed"]) == (1, 1)
    found = await hits(
        client, "缬沙坦召回", mode=mode, explain=True, passages=2, fields=["snippet", "text", "metadata"]
    )
    best = found[0]
    assert (best["id"], best["text"], best["metadata"]) == ("notice-1", NOTICE["text"], NOTICE["metadata"])
    assert "缬沙坦" in {best["snippet"][start:end] for start, end in best["highlights"]}
    assert best["passages"][0]["text"] == NOTICE["text"]
    for side in ("dense", "lexical"):
        assert (best["explain"][side] or {}).get("rank") == (1 if mode in (side, "hybrid") else None)
    assert await ids(client, "缬沙坦召回", mode=mode, min_score=best["score"]) == ["notice-1"]
    assert [hit["score"] for hit in found] == sorted((hit["score"] for hit in found), reverse=True)


async def test_filters_and_facets_include_a_posted_document(client: httpx.AsyncClient) -> None:
    before = (await client.get("/v1/collection")).json()
    await post(client, NOTICE)
    assert await ids(client, "召回", filters=[{"field": "kind", "eq": "notice"}]) == ["notice-1"]
    assert await ids(client, "召回", filters=[{"field": "year", "gte": 2026}]) == ["notice-1"]
    assert await ids(client, "召回", filters=[{"field": "region", "eq": "华北"}]) == ["notice-1"]
    assert "notice-1" not in await ids(client, "召回", filters=[{"field": "kind", "eq": "drug"}])
    after = (await client.get("/v1/collection")).json()
    assert after["documents"] == before["documents"] + 1
    assert after["passages"] == before["passages"] + 1
    assert after["facets"]["kind"] == before["facets"]["kind"] | {"notice": 1}
    assert after["fields"] == ["kind", "region", "year"]
    assert after["fresh"] == {"position": 1, "documents": 1, "changes": 1, "passages": 1, "limit": 10_000}


async def test_a_document_of_the_snapshot_is_replaced_and_then_deleted(client: httpx.AsyncClient) -> None:
    assert (await ids(client, "高血压吃什么药"))[0] == "a-1"
    fracture = {"id": "a-1", "title": "骨折", "text": "骨折要固定，夹板固定后就医。"}
    await post(client, fracture | {"metadata": {"kind": "new"}})
    assert (await client.get("/v1/documents/a-1")).json()["metadata"] == {"kind": "new"}
    assert "a-1" not in await ids(client, "高血压吃什么药", mode="lexical")
    assert set(await ids(client, "骨折", top_k=2)) == {"a-1", "a-5"}
    assert len(await ids(client, "骨折", top_k=100, mode="dense")) == 8
    assert (await client.delete("/v1/documents/a-1")).json()["changed"] == 1
    assert (await client.get("/v1/documents/a-1")).status_code == 404
    assert "a-1" not in await ids(client, "骨折", top_k=100, mode="dense")
    assert (await client.delete("/v1/documents/a-1")).json()["changed"] == 0
    await post(client, {"id": "a-1", "text": "高血压吃氨氯地平。"})
    assert (await ids(client, "高血压吃什么药"))[0] == "a-1"


async def test_an_identical_post_is_written_once(client: httpx.AsyncClient) -> None:
    first = (await post(client, NOTICE)).json()
    assert (await post(client, NOTICE)).json() == first | {"changed": 0}
    again = (await post(client, NOTICE, NOTICE | {"id": "notice-2"})).json()
    assert (again["position"], again["changed"]) == (2, 1)


async def test_new_metadata_for_an_unchanged_text_reuses_its_vector(client: httpx.AsyncClient) -> None:
    before = {hit["id"]: hit["score"] for hit in await hits(client, "高血压吃什么药", mode="dense", top_k=8)}
    stored = (await client.get("/v1/documents/a-1")).json()
    await post(client, {name: stored[name] for name in ("id", "title", "text")} | {"metadata": {"kind": "notice"}})
    after = await hits(client, "高血压吃什么药", mode="dense", top_k=8)
    assert after[0]["metadata"] == {"kind": "notice"}
    assert {hit["id"]: hit["score"] for hit in after} == pytest.approx(before, abs=1e-3)


async def test_a_long_document_is_cut_into_passages(client: httpx.AsyncClient) -> None:
    await post(client, {"id": "long", "title": "头痛二", "text": LONG})
    (hit,) = await hits(client, "头痛", filters=[], top_k=1, passages=5, fields=["text"])
    assert hit["id"] in ("long", "a-6")
    assert (await client.get("/v1/collection")).json()["passages"] >= 15 + 2


async def test_a_change_invalidates_cached_answers(client: httpx.AsyncClient) -> None:
    assert await ids(client, "缬沙坦") == await ids(client, "缬沙坦")
    await post(client, NOTICE)
    assert (await ids(client, "缬沙坦"))[0] == "notice-1"
    await client.delete("/v1/documents/notice-1")
    assert "notice-1" not in await ids(client, "缬沙坦")


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "between 1 and 2048 documents"),
        ([{"text": "no id"}], "documents[0]: give an id"),
        ([{"id": "", "text": "x"}], "at least 1 character"),
        ([{"id": "\u200b", "text": "x"}], "documents[0]: its id has no visible character"),
        ([{"id": "x\n", "text": "x"}], "documents[0]: its id has a control character"),
        ([{"id": "x" * 1025, "text": "x"}], "documents[0]: its id has 1,025 bytes, and at most 1,024 are allowed"),
        ([{"id": "..", "text": "x"}], "documents[0]: its id is a step in an address"),
        ([{"id": "x"}], "documents[0]: has neither text nor title"),
        ([{"id": "x", "text": " ", "title": "\n"}], "documents[0]: has neither text nor title"),
        ([{"id": "x", "text": "\u200b"}], "documents[0]: has neither text nor title"),
        ([{"id": "x", "text": 7}], "valid string"),
        ([{"id": "x", "text": "y", "colour": "red"}], "documents[0].colour: there is no such field"),
        ([{"id": "x", "text": "y"}, {"id": "x", "text": "z"}], "documents[1]: has the id of documents[0]"),
        ([{"_id": "x", "text": "y"}, {"id": "x", "text": "z"}], "documents[1]: has the id of documents[0]"),
        ([{"id": "x", "text": "y", "metadata": {"year": "2024"}}], "field year is text here and a number elsewhere"),
        ([{"id": "x", "text": "y", "metadata": {"a": {"b": 1}}}], "field a is neither text, number"),
        ([{"id": "x", "text": "y", "metadata": {"a": 2**70}}], "more than 64 bits"),
        ([{"id": "x", "text": "y", "metadata": {"": 1}}], "documents[0].metadata: a metadata field's name has 0"),
        ([{"id": "x", "text": "y", "metadata": {"n" * 201: 1}}], "name has 201 characters; give it 1 to 200"),
        (
            [{"id": "x", "text": "y", "metadata": dict.fromkeys(map(str, range(199)), 1)}],
            "documents: with them the collection has 201 metadata fields, and at most 200 can be filtered by",
        ),
        (
            [{"id": "x", "text": "y", "metadata": {"n": 1}}, {"id": "z", "text": "y", "metadata": {"n": "one"}}],
            "documents[1].metadata: field n is text here and a number elsewhere",
        ),
    ],
)
async def test_an_invalid_document_is_named_and_none_is_stored(
    client: httpx.AsyncClient, documents: list[dict[str, Any]], message: str
) -> None:
    response = await post(client, *documents)
    assert response.status_code == 422
    assert response.json()["error"]["field"] == "documents"
    assert message in response.json()["error"]["message"]
    assert (await client.get("/v1/collection")).json()["fresh"]["position"] == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e400"])
async def test_a_number_that_is_not_finite_is_refused(client: httpx.AsyncClient, number: str) -> None:
    body = f'{{"documents": [{{"id": "x", "text": "y", "metadata": {{"n": {number}}}}}]}}'
    response = await client.post("/v1/documents", content=body)
    assert response.status_code == 422
    assert "n is not a finite number" in response.json()["error"]["message"]


async def test_an_id_with_a_trailing_line_break_is_refused(client: httpx.AsyncClient) -> None:
    await post(client, {"id": "x", "text": "y"})
    for path in ("/v1/documents/x%0A", "/v1/documents/"):
        assert (await client.delete(path)).status_code == 422
        assert (await client.get(path)).status_code == 422
    assert (await client.get("/v1/documents/x")).status_code == 200


@pytest.mark.parametrize("sent", ["%00", "a%7F", "%E2%80%8B", "%2E%2E", "x" * 1025])
async def test_the_deletion_of_an_id_that_no_document_can_have_is_refused(client: httpx.AsyncClient, sent: str) -> None:
    before = (await client.delete("/v1/documents/nobody")).json()["position"]
    response = await client.delete(f"/v1/documents/{sent}")
    assert response.status_code == 422
    assert response.json()["error"]["field"] == "id"
    assert (await client.delete("/v1/documents/nobody")).json()["position"] == before
    assert (await client.get(f"/v1/documents/{sent}")).status_code == 404


async def test_an_id_that_is_not_utf_8_is_refused_and_taken_for_no_other(client: httpx.AsyncClient) -> None:
    await post(client, {"id": "x\ufffd", "text": "y"})
    for sent in ("x%FF", "x%ED%A0%80"):
        assert (await client.delete(f"/v1/documents/{sent}")).status_code == 422
        assert (await client.get(f"/v1/documents/{sent}")).status_code == 422
    assert (await client.get("/v1/documents/x%EF%BF%BD")).status_code == 200


async def test_the_id_field_may_be_called_underscore_id_as_in_a_corpus(client: httpx.AsyncClient) -> None:
    assert (
        await post(client, {"_id": "notice-9", "text": "缬沙坦召回"}, {"_id": 9, "text": "nine"})
    ).status_code == 200
    assert (await client.get("/v1/documents/notice-9")).json()["id"] == "notice-9"
    assert (await client.get("/v1/documents/9")).json()["text"] == "nine"


async def test_integers_are_accepted_as_ids_as_in_a_corpus(client: httpx.AsyncClient) -> None:
    await post(client, {"id": 7, "text": "seven"})
    assert (await client.get("/v1/documents/7")).json()["id"] == "7"


async def test_a_body_too_large_is_refused(own: Built) -> None:
    async with running(make_settings(own, threads=1, max_body_bytes=1024)) as client:
        assert (await post(client, NOTICE | {"text": "长" * 1000})).status_code == 413


async def test_a_post_beyond_the_limit_is_refused_with_advice_to_reindex(own: Built) -> None:
    async with running(make_settings(own, threads=1, fresh_limit=2)) as client:
        assert (await post(client, NOTICE)).status_code == 200
        refused = await post(client, NOTICE | {"id": "x"}, NOTICE | {"id": "y"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "fresh_limit")
        assert "re-index" in refused.json()["error"]["message"]
        assert (await post(client, NOTICE | {"id": "x"})).status_code == 200
        assert (await client.delete("/v1/documents/x")).status_code == 200  # deletions are still accepted
        assert (await post(client, NOTICE)).status_code == 200  # it is already stored


async def test_the_limit_counts_passages(own: Built) -> None:
    """A long document has many passages; one that is too long is refused before any of it is encoded."""
    async with running(make_settings(own, threads=1, fresh_limit=3)) as client:
        refused = await post(client, {"id": "long", "title": "头痛二", "text": LONG})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "fresh_limit")
        assert "0 passages were posted" in refused.json()["error"]["message"]
        assert (await post(client, NOTICE)).status_code == 200


async def test_concurrent_posts_are_checked_against_each_other(own: Built) -> None:
    """Two services share a collection: a field holds one kind of value, and the limit is never exceeded."""
    settings = make_settings(own, threads=1, reload_seconds=0, fresh_limit=3)
    async with running(settings) as one, running(settings) as other:
        five = [post(client, {"id": f"five-{value}", "text": "五", "metadata": {"zz": value}})
                for client, value in ((one, 5), (other, "five"))]  # fmt: skip
        answers = sorted([answer.status_code for answer in await asyncio.gather(*five)])
        assert answers == [200, 422]
        many = [post(client, {"id": f"n-{number}", "text": "多"}) for number in range(5) for client in (one, other)]
        statuses = [answer.status_code for answer in await asyncio.gather(*many)]
        assert sorted(set(statuses)) == [200, 409]
        assert (await one.get("/v1/collection")).json()["fresh"]["passages"] == 3


def dosed(name: str, dose: object) -> dict[str, Any]:
    return {"id": name, "text": f"剂量 {name}", "metadata": {"dose": dose}}


async def test_a_field_may_change_its_kind_once_no_document_has_the_old_kind(own: Built, encoder: OnnxEncoder) -> None:
    """Deleted or replaced by the same post; until then both kinds never exist at once."""
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        assert (await post(client, dosed("x", 5), dosed("y", 6), {"id": "z", "text": "剂量"})).status_code == 200
        assert (await client.delete("/v1/documents/x")).status_code == 200
        refused = await post(client, dosed("v", "five"))
        assert "field dose is text here and a number elsewhere" in refused.json()["error"]["message"]
        assert (await post(client, dosed("y", "six"), dosed("w", "five"))).status_code == 200
        assert await ids(client, "剂量", filters=[{"field": "dose", "eq": "five"}]) == ["w"]
        assert await ids(client, "剂量", filters=[{"field": "dose", "in": ["six", "5"]}]) == ["y"]
        collection = (await client.get("/v1/collection")).json()
        assert collection["facets"]["dose"] == {"five": 1, "six": 1}
        assert "dose" not in collection["numbers"]
        assert (await post(client, dosed("v", 7))).status_code == 422
        for name in ("w", "y"):
            await client.delete(f"/v1/documents/{name}")
        gone = await client.post("/v1/search", json={"query": "剂量", "filters": [{"field": "dose", "eq": "five"}]})
        assert "no such field; it has kind, year" in gone.json()["error"]["message"]
        assert "dose" not in (await client.get("/v1/collection")).json()["facets"]
        assert (await post(client, dosed("v", 7))).status_code == 200
        built = build(
            [corpus_of(own, "a-1")], encoder, Collection(own.root), BuildOptions(passage_tokens=64, overlap=16)
        )
        Collection(own.root).publish(built.version)
        await client.post("/admin/reload")
        assert await ids(client, "剂量", filters=[{"field": "dose", "gte": 7}]) == ["v"]


async def test_a_field_kind_of_the_snapshot_ends_with_its_last_document(own: Built, encoder: OnnxEncoder) -> None:
    """The next build, whose corpus still has the deleted documents, keeps the kind of the posted one."""
    named = [f"a-{number}" for number in range(1, 9)]
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        for name in named[1:]:
            await client.delete(f"/v1/documents/{name}")
        assert (await post(client, {"id": "x", "text": "药", "metadata": {"year": "today"}})).status_code == 422
        assert (await post(client, {"id": named[0], "text": "药", "metadata": {"year": "today"}})).status_code == 200
        collection = Collection(own.root)
        for _ in range(2):
            assert await ids(client, "药", filters=[{"field": "year", "eq": "today"}]) == [named[0]]
            described = (await client.get("/v1/collection")).json()
            assert (described["facets"]["year"], described["numbers"]) == ({"today": 1}, {})
            built = build(
                [corpus_of(own, *named, year=2024)], encoder, collection, BuildOptions(passage_tokens=64, overlap=16)
            )
            collection.publish(built.version)
            await client.post("/admin/reload")


async def test_equal_numbers_are_counted_together(client: httpx.AsyncClient) -> None:
    """Filters treat 5 and 5.0 as equal."""
    await post(client, dosed("x", 5), dosed("y", 5.0), dosed("z", 5.5))
    answer = await client.post("/v1/search", json={"query": "剂量", "facets": ["dose"], "mode": "dense"})
    assert answer.json()["results"][0]["facets"]["dose"] == {"5": 2, "5.5": 1}
    assert set(await ids(client, "剂量", filters=[{"field": "dose", "eq": 5}])) == {"x", "y"}


async def test_filter_errors_name_the_fields_of_posted_documents(client: httpx.AsyncClient) -> None:
    await post(client, NOTICE)
    for field, message in (
        ("regio", "it has kind, region, year; did you mean region?"),
        ("zz", "it has kind, region, year"),
    ):
        response = await client.post("/v1/search", json={"query": "药", "filters": [{"field": field, "eq": "x"}]})
        assert (response.status_code, response.json()["error"]["field"]) == (422, "filters")
        assert message in response.json()["error"]["message"]


async def test_a_document_that_is_not_served_can_be_deleted(own: Built, encoder: OnnxEncoder) -> None:
    """A build in progress, or a version that is a rollback target, may hold it."""
    collection = Collection(own.root)
    began = asyncio.Event()
    withdrawn = asyncio.Event()
    loop = asyncio.get_running_loop()

    def encode(shards: Iterable[list[str]], reading: Encoder, place: Shards) -> Iterator[int]:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(withdrawn.wait(), loop).result(30)
        yield from encode_here(shards, reading, place)

    options = BuildOptions(passage_tokens=64, overlap=16, encode=encode)
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        building = asyncio.create_task(
            asyncio.to_thread(build, [corpus_of(own, "a-1", "recalled")], encoder, collection, options)
        )
        await began.wait()
        answer = (await client.delete("/v1/documents/recalled")).json()
        assert (answer["position"], answer["changed"]) == (1, 0)
        assert (await client.delete("/v1/documents/recalled")).json() == answer  # repeated: same answer
        withdrawn.set()
        first = (await building).version
        for version in (first, own.versions["a"], first):
            collection.publish(version, force=True)
            await client.post("/admin/reload")
            assert (await client.get("/v1/collection")).json()["snapshot"] == version
            assert (await client.get("/v1/documents/recalled")).status_code == 404
        # The next build leaves it out. A rollback to the version that holds it does not bring it back either.
        options = BuildOptions(passage_tokens=64, overlap=16)
        second = build([corpus_of(own, "a-1", "recalled")], encoder, collection, options)
        for version in (second.version, first):
            collection.publish(version)
            await client.post("/admin/reload")
            assert (await client.get("/v1/documents/recalled")).status_code == 404


async def test_a_post_that_a_build_may_have_read_is_written_again(client: httpx.AsyncClient, own: Built) -> None:
    """Otherwise a second build would use the corpus's text in place of a post acknowledged after it began."""
    log = Collection(own.root).fresh_log
    assert (await post(client, NOTICE)).json()["position"] == 1
    assert (await client.delete("/v1/documents/a-2")).json()["position"] == 2
    log.seal()
    again = (await post(client, NOTICE)).json()
    assert (again["position"], again["changed"]) == (3, 0)
    assert (await client.delete("/v1/documents/a-2")).json()["position"] == 4
    assert (await post(client, NOTICE)).json()["position"] == 4


async def test_only_administrators_change_documents(own: Built) -> None:
    for token in (None, "secret"):
        app = create_app(make_settings(own, threads=1, admin_token=token))
        refused = 403 if token is None else 401
        async with app.router.lifespan_context(app), client_of(app, {}) as stranger:
            assert (await post(stranger, NOTICE)).status_code == refused
            assert (await stranger.delete("/v1/documents/a-1")).status_code == refused
            assert (await stranger.get("/v1/documents/a-1")).status_code == 200
            stranger.headers["authorization"] = "Bearer secret"
            assert (await post(stranger, NOTICE)).status_code == (403 if token is None else 200)


async def test_examples_of_the_docs_are_requests_that_work(client: httpx.AsyncClient) -> None:
    operation = (await client.get("/openapi.json")).json()["paths"]["/v1/documents"]["post"]
    for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
        response = await client.post("/v1/documents", json=example["value"])
        assert response.status_code == 200, response.text


async def test_a_restart_restores_every_acknowledged_change_despite_a_torn_log_tail(own: Built) -> None:
    settings = make_settings(own, threads=1, reload_seconds=0)
    async with running(settings) as client:
        await post(client, NOTICE)
        await client.delete("/v1/documents/a-2")
    (segment,) = (own.root / "fresh").glob("*.log")
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[:77])
    async with running(settings) as client:
        assert (await ids(client, "缬沙坦"))[0] == "notice-1"
        assert (await client.get("/v1/documents/a-2")).status_code == 404
        assert (await post(client, NOTICE | {"id": "notice-2"})).json()["position"] == 3
    async with running(settings) as client:
        assert (await client.get("/v1/documents/notice-2")).status_code == 200


async def test_a_damaged_log_is_refused_rather_than_dropped(own: Built) -> None:
    settings = make_settings(own, threads=1, reload_seconds=0)
    async with running(settings) as client:
        await post(client, NOTICE)
        await client.delete("/v1/documents/a-2")
        (segment,) = (own.root / "fresh").glob("*.log")
        content = bytearray(segment.read_bytes())
        content[50] ^= 1
        segment.write_bytes(content)
        assert (await client.get("/v1/documents/a-2")).status_code == 404  # what was read before stays
    with pytest.raises(Exception, match="restore it from a backup"):
        async with running(settings):
            pass


async def test_a_full_disk_is_reported_and_changes_nothing(own: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(position: int, changes: Sequence[Change]) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(own.root))

    monkeypatch.setattr(fresh_log, "write_frame", full)
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        refused = await post(client, NOTICE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_kept")
        assert str(own.root) not in refused.text
        assert "notice-1" not in await ids(client, "缬沙坦")


async def test_vectors_of_another_encoder_are_recomputed(own: Built) -> None:
    text = str(NOTICE["text"])
    foreign = Posted("notice-1", "缬沙坦批次召回", text, {}, [(0, 3)], "another", np.ones((1, 4), np.float16))
    Collection(own.root).fresh_log.append([foreign, Deleted("a-2")])
    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        first = await hits(client, "缬沙坦召回", mode="dense", passages=1)
        assert first[0]["id"] == "notice-1"
        assert first[0]["passages"][0]["span"] == [0, len(text)]
        assert (await client.get("/v1/documents/a-2")).status_code == 404


def corpus_of(own: Built, *ids: str, **metadata: object) -> Path:
    path = own.root.parent / "next.jsonl"
    rows = [{"_id": each, "title": f"标题 {each}", "text": f"正文 {each}", "metadata": metadata} for each in ids]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


async def test_a_reindex_takes_in_posted_documents_and_a_rollback_restores_them(
    own: Built, encoder: OnnxEncoder
) -> None:
    collection = Collection(own.root)

    def reindex(*ids: str) -> str:
        version = build(
            [corpus_of(own, *ids)], encoder, collection, BuildOptions(passage_tokens=64, overlap=16)
        ).version
        collection.publish(version)
        return version

    async def fresh(client: httpx.AsyncClient) -> tuple[int, int]:
        facts = (await client.get("/v1/collection")).json()["fresh"]
        return facts["position"], facts["changes"]

    async with running(make_settings(own, threads=1, reload_seconds=0)) as client:
        await post(client, NOTICE)
        await client.delete("/v1/documents/a-2")
        reindex("a-1", "a-2")
        await post(client, NOTICE | {"id": "late"})  # after the build, before the swap
        await client.post("/admin/reload")
        assert await fresh(client) == (3, 1)
        assert (await ids(client, "缬沙坦召回", mode="dense"))[0] in ("notice-1", "late")
        shown = {name: (await client.get(f"/v1/documents/{name}")).status_code for name in ("notice-1", "late", "a-2")}
        assert shown == {"notice-1": 200, "late": 200, "a-2": 404}
        # Rolled back to the first version: the log still has what this version lacks.
        await client.post("/admin/rollback", params={"version": own.versions["a"]})
        assert await fresh(client) == (3, 3)
        shown = {name: (await client.get(f"/v1/documents/{name}")).status_code for name in ("notice-1", "late", "a-2")}
        assert shown == {"notice-1": 200, "late": 200, "a-2": 404}
        assert (await client.get("/v1/documents/a-3")).status_code == 200
        # Forward again: everything is indexed, nothing is left in the log.
        reindex("a-1", "a-2")
        await client.post("/admin/reload")
        assert await fresh(client) == (3, 0)
        assert set(await ids(client, "正文", mode="dense")) == {"a-1", "notice-1", "late"}
        assert (await post(client, NOTICE | {"id": "later"})).json()["position"] == 4
        assert "later" in await ids(client, "缬沙坦召回", mode="dense")
