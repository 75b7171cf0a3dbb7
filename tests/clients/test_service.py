"""Every call of both clients against the real service."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from care_client import ApiError, CareClient, CareClientError, Changes, InvalidRequest, NewDocument, NotFound
from care_client.answers import Result
from care_client.retrieval import metadata_of


def test_a_search_returns_hits_with_the_requested_fields(client: CareClient) -> None:
    answer = client.search("高血压吃什么药", top_k=3, fields=["title", "snippet", "metadata", "text", "headline"])
    best = answer.hits[0]
    assert (len(answer.hits), best.id, best.title) == (3, "a-1", "高血压用药")
    assert best.metadata == {"kind": "drug", "year": 2024}
    assert best.text is not None
    assert best.headline == best.title
    assert best.snippet is not None
    assert best.snippet in best.text
    assert "高血压" in {best.snippet[start:end] for start, end in best.highlights}
    assert best.score >= answer.hits[1].score
    assert answer.timings_ms["total"] > 0
    assert answer.snapshot == client.collection().snapshot


def test_several_queries_are_answered_in_their_order(client: CareClient) -> None:
    answer = client.search(["骨折", "发热", "高血压"], top_k=1)
    assert [result.hits[0].id for result in answer.results] == ["a-5", "a-3", "a-1"]
    assert not any(result.truncated for result in answer.results)
    with pytest.raises(ValueError, match="3 results"):
        answer.hits  # noqa: B018 (the property raises)


def test_all_parameters_reach_the_service(client: CareClient) -> None:
    answer = client.search(
        "发热怎么办",
        top_k=8,
        mode="hybrid",
        fields=["text"],
        filters=[{"field": "kind", "in": ["drug", "disease"]}, {"field": "year", "gte": 2021}],
        fusion="scores",
        weight=0.4,
        min_score=0.01,
        passages=2,
        explain=True,
        timeout_ms=60_000,
        bulk=True,
        cache=False,
    )
    assert {hit.id for hit in answer.hits} <= {"a-1", "a-2", "a-3", "a-6"}
    best = answer.hits[0]
    assert best.id == "a-3"
    assert best.title is None
    assert best.metadata == {}
    assert best.explanation is not None
    assert best.explanation.weight == 0.4
    assert best.explanation.dense is not None
    assert best.explanation.dense.rank == 1
    assert best.text is not None
    passage = best.passages[0]
    assert passage.text == best.text[passage.start : passage.end]
    assert all(hit.score >= 0.01 for hit in answer.hits)


def test_pages_facets_and_nested_filters_work(client: CareClient) -> None:
    filters = [{"not": {"any": [{"field": "kind", "eq": "test"}, {"field": "year", "lt": 2021}]}}]
    pages = [client.search("发热怎么办", top_k=3, offset=start, filters=filters, facets=["kind"]) for start in (0, 3)]
    ids = [hit.id for page in pages for hit in page.hits]
    assert set(ids) == {"a-1", "a-2", "a-3", "a-4", "a-5", "a-6"}
    assert all(page.results[0].facets == {"kind": {"disease": 2, "drug": 2, "first-aid": 2}} for page in pages)
    assert client.search("发热").results[0].facets == {}


def test_a_plain_search_has_no_explanation(client: CareClient) -> None:
    hit = client.search("发热", mode="lexical").hits[0]
    assert hit.explanation is None
    assert hit.passages == ()
    assert hit.text is None


def test_a_stream_gives_the_results_of_a_search(client: CareClient) -> None:
    queries = ["骨折", "发热", "高血压"] * 20
    streamed = list(client.stream(queries, top_k=2, cache=False))
    whole = client.search(queries, top_k=2, cache=False).results
    assert [[hit.id for hit in result.hits] for result in streamed] == [
        [hit.id for hit in result.hits] for result in whole
    ]


def test_a_text_alone_is_one_text(client: CareClient) -> None:
    assert len(list(client.stream("高血压"))) == 1
    assert [each.index for each in client.rerank("高血压吃什么药", "高血压可以服用氨氯地平。")] == [0]


def test_a_stream_can_be_closed_early(client: CareClient) -> None:
    results = client.stream(["骨折", "发热"] * 50)
    assert next(results).hits[0].id == "a-5"
    results.close()  # type: ignore[attr-defined]
    assert client.search("发热").hits[0].id == "a-3"


def test_get_document_returns_the_whole_document(client: CareClient) -> None:
    document = client.document("a-1")
    assert document.title == "高血压用药"
    assert "氨氯地平" in document.text
    assert document.metadata["year"] == 2024
    with pytest.raises(NotFound) as caught:
        client.document("no/such document")
    assert caught.value.code == "not_found"
    assert caught.value.request_id
    with pytest.raises(CareClientError, match="is this the id of a document"):
        client.document("x" * 70_000)


def test_the_collection_lists_its_fields(client: CareClient) -> None:
    collection = client.collection()
    assert (collection.documents, collection.default_mode) == (8, "hybrid")
    assert set(collection.modes) == {"dense", "lexical", "hybrid"}
    assert {"kind", "year"} <= set(collection.fields)
    assert collection.facets["kind"]["drug"] == 2
    assert collection.numbers["year"] == {"min": 2020, "max": 2025}
    assert collection.encoder["dim"] > 0


def test_embeddings_are_unit_vectors_in_order(client: CareClient) -> None:
    answer = client.embeddings(["发热", "骨折", "发热"])
    first, other, again = answer.vectors
    assert len(first) == client.collection().encoder["dim"]
    assert math.isclose(_dot(first, first), 1.0, abs_tol=1e-5)
    assert _dot(first, again) > 0.999 > _dot(first, other)
    assert answer.tokens > 0
    (short,) = client.embeddings("发热", dimensions=64).vectors
    assert len(short) == 64
    assert math.isclose(_dot(short, short), 1.0, abs_tol=1e-5)


def test_reranking_puts_the_best_text_first(client: CareClient) -> None:
    texts = ["骨折后用夹板固定。", "高血压可以服用氨氯地平。", "血常规检查白细胞。"]
    ranked = client.rerank("高血压吃什么药", texts)
    assert ranked[0].index == 1
    assert sorted(each.index for each in ranked) == [0, 1, 2]
    assert ranked[0].score >= ranked[1].score >= ranked[2].score
    assert client.rerank("高血压吃什么药", texts, top_n=1) == ranked[:1]


def test_health_names_the_served_snapshot(client: CareClient) -> None:
    health = client.health()
    assert health.ready
    assert health.snapshot == client.collection().snapshot
    assert health.reason is None


def test_a_wrong_parameter_is_named(client: CareClient) -> None:
    with pytest.raises(InvalidRequest, match="top_k") as caught:
        client.search("发热", top_k=0)
    error = caught.value
    assert (error.status, error.code, error.field) == (422, "invalid_request", "top_k")
    assert error.request_id in str(error)
    with pytest.raises(ApiError):
        list(client.stream(["发热", ""]))


def test_documents_can_be_posted_and_deleted(client: CareClient) -> None:
    before = client.collection().documents
    notice: NewDocument = {"id": "notice/7", "title": "缬沙坦召回", "text": "部分批次的缬沙坦片召回。"}
    added = client.add_documents([notice, {"id": "notice 8", "title": "只有标题"}])
    try:
        assert (added.changed, client.collection().documents) == (2, before + 2)
        assert client.search("缬沙坦召回").hits[0].id == "notice/7"
        assert client.document("notice/7").title == "缬沙坦召回"
        assert client.add_documents([notice]) == Changes(added.position, 0, added.snapshot)
        with pytest.raises(InvalidRequest, match="year"):
            client.add_documents([{"id": "x", "text": "y", "metadata": {"year": "last"}}])
    finally:
        gone = [client.delete_document(each) for each in ("notice/7", "notice 8")]
    assert [each.changed for each in gone] == [1, 1]
    assert client.delete_document("notice/7").changed == 0
    assert client.collection().documents == before


def _dot(one: object, other: object) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))  # type: ignore[call-overload]


def test_reranker_scores_are_part_of_hits_and_results() -> None:
    hits = [{"id": "a", "score": 0.5, "rerank_score": 0.9}, {"id": "b", "score": 0.7}]
    result = Result.parse({"hits": hits, "truncated": False, "rerank": {"depth": 2, "scored": 1}})
    assert [hit.rerank_score for hit in result.hits] == [0.9, None]
    assert result.rerank == {"depth": 2, "scored": 1}
    assert metadata_of(result.hits[0])["care_rerank_score"] == 0.9
    assert "care_rerank_score" not in metadata_of(result.hits[1])


def test_reranking_without_a_reranker_raises_an_error_with_the_remedy(client: CareClient) -> None:
    with pytest.raises(InvalidRequest, match="CARE_RERANKER"):
        client.search("头痛", rerank={"depth": 5})


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.search("\ud800"),
        lambda client: client.search("头痛", min_score=math.nan),
        lambda client: client.search("头痛", fields={"title"}),
        lambda client: client.search("头痛", filters=[{"field": "updated", "gte": date(2025, 1, 1)}]),
        lambda client: client.document("\ud800"),
        lambda client: client.delete_document("\ud800"),
        lambda client: client.rerank("头痛", ["\ud800"]),
        lambda client: client.add_documents([{"id": "a", "text": "\udcff"}]),
    ],
)
def test_what_cannot_be_sent_is_an_error_of_the_client(client: CareClient, ask: Callable[[CareClient], Any]) -> None:
    with pytest.raises(CareClientError, match=r"surrogate|cannot be sent as JSON"):
        ask(client)


@pytest.mark.parametrize("id", [".", "..", "a/../b", "%2e"])
def test_an_id_of_dots_is_no_other_path(client: CareClient, id: str) -> None:
    with pytest.raises(NotFound, match="no document with this id"):
        client.document(id)
