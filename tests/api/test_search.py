"""/v1/search through the whole app: answers to valid requests."""

from __future__ import annotations

import httpx
import pytest

from tests.api.support import ENTRIES, Built

pytestmark = pytest.mark.anyio

STAGES = ["tokenize", "queue", "encode", "search", "rerank", "fetch", "total"]


async def post(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post("/v1/search", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
@pytest.mark.parametrize(
    ("query", "expected"), [("高血压吃什么药", "a-1"), ("血糖高怎么吃", "a-2"), ("asthma inhaler", "a-7")]
)
async def test_every_mode_finds_the_entry(client: httpx.AsyncClient, mode: str, query: str, expected: str) -> None:
    answer = await post(client, query=query, mode=mode, top_k=3)
    assert answer["results"][0]["hits"][0]["id"] == expected


async def test_the_answer_has_the_documented_shape(client: httpx.AsyncClient, built: Built) -> None:
    answer = await post(client, query="高血压")
    assert list(answer) == ["results", "snapshot", "timings_ms"]
    assert answer["snapshot"] == built.versions["a"]
    assert list(answer["timings_ms"]) == STAGES
    (result,) = answer["results"]
    assert list(result) == ["hits", "truncated"]
    assert result["truncated"] is False
    hit = result["hits"][0]
    assert set(hit) == {"id", "score", "title", "metadata", "snippet", "highlights"}
    assert hit["metadata"] == {"kind": "drug", "year": 2024}
    marked = {hit["snippet"][start:end] for start, end in hit["highlights"]}
    assert marked == {"高血压"}


async def test_get_and_post_give_the_same_answer(client: httpx.AsyncClient) -> None:
    by_post = await post(client, query="发热", top_k=2, mode="dense", filters=[{"field": "kind", "eq": "drug"}])
    response = await client.get(
        "/v1/search", params={"q": "发热", "top_k": 2, "mode": "dense", "filter": "kind:eq:drug"}
    )
    assert response.json()["results"] == by_post["results"]
    assert [hit["id"] for hit in by_post["results"][0]["hits"]] == ["a-3", "a-1"]


async def test_many_queries_are_answered_in_their_order(client: httpx.AsyncClient) -> None:
    queries = ["骨折", "高血压吃什么药", "骨折", "血常规", "心肺复苏", "asthma", "糖尿病", "发热", "头痛", "布洛芬"]
    # Only the first hit: an int8 graph scales a batch as a whole, so near ties may swap between batches.
    many = await post(client, query=queries, top_k=1)
    alone = [(await post(client, query=query, top_k=1))["results"][0] for query in queries]
    assert [result["hits"][0]["id"] for result in many["results"]] == [result["hits"][0]["id"] for result in alone]


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
async def test_a_long_document_is_one_hit_and_does_not_crowd_out_others(client: httpx.AsyncClient, mode: str) -> None:
    answer = await post(client, query="头痛 感冒 疲劳 高血压 发热", mode=mode, top_k=3)
    ids = [hit["id"] for hit in answer["results"][0]["hits"]]
    assert len(ids) == len(set(ids)) == 3
    assert "a-6" in ids


async def test_top_k_beyond_the_collection_returns_all_documents(client: httpx.AsyncClient) -> None:
    answer = await post(client, query="治疗", mode="dense", top_k=100)
    hits = answer["results"][0]["hits"]
    assert sorted(hit["id"] for hit in hits) == [f"a-{entry['id']}" for entry in ENTRIES]
    scores = [hit["score"] for hit in hits]
    assert scores == sorted(scores, reverse=True)
    assert all(score == round(score, 6) for score in scores)


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([{"field": "kind", "eq": "first-aid"}], {"4", "5"}),
        ([{"field": "kind", "in": ["test", "first-aid"]}], {"4", "5", "8"}),
        ([{"field": "year", "gte": 2024, "lt": 2025}], {"1", "8"}),
        ([{"field": "year", "gt": 2023.5}, {"field": "kind", "eq": "drug"}], {"1"}),
        ([{"field": "kind", "eq": "nothing of the kind"}], set()),
        ([{"not": {"field": "kind", "in": ["drug", "disease"]}}], {"4", "5", "8"}),
        ([{"any": [{"field": "kind", "eq": "test"}, {"field": "year", "lt": 2022}]}], {"6", "7", "8"}),
        ([{"not": {"any": [{"field": "year", "gte": 2022}, {"not": {"field": "kind", "eq": "disease"}}]}}], {"6", "7"}),
    ],
)
async def test_filters_hold_in_every_mode(
    client: httpx.AsyncClient, mode: str, filters: list[dict], expected: set[str]
) -> None:
    query = "心肺复苏 骨折 血常规 白细胞 高血压 用药 发热 asthma 糖尿病 头痛"
    answer = await post(client, query=query, mode=mode, top_k=100, filters=filters)
    assert {hit["id"].removeprefix("a-") for hit in answer["results"][0]["hits"]} == expected


async def test_a_filter_in_a_url_may_be_negated(client: httpx.AsyncClient) -> None:
    url = "/v1/search?q=心肺复苏&mode=dense&top_k=100&filter=kind:not.in:drug,disease&filter=year:not.eq:2024"
    response = await client.get(url)
    assert {hit["id"] for hit in response.json()["results"][0]["hits"]} == {"a-4", "a-5"}


async def test_only_the_requested_fields_are_returned(client: httpx.AsyncClient) -> None:
    async def hit(fields: list[str]) -> dict:
        return (await post(client, query="骨折", fields=fields, mode="lexical"))["results"][0]["hits"][0]

    assert set(await hit([])) == {"id", "score"}
    assert set(await hit(["title"])) == {"id", "score", "title"}
    assert (await hit(["metadata", "text"]))["text"] == ENTRIES[4]["text"]
    everything = await hit(["text", "snippet", "title", "metadata"])
    assert set(everything) == {"id", "score", "title", "metadata", "snippet", "highlights", "text"}


async def test_a_query_beyond_the_encoders_limit_is_truncated_and_reported(client: httpx.AsyncClient) -> None:
    answer = await post(client, query=["高血压吃什么药" * 300, "高血压吃什么药"], mode="dense")
    assert [result["truncated"] for result in answer["results"]] == [True, False]
    assert answer["results"][0]["hits"][0]["id"] == "a-1"
    endless = await post(client, query="高血压" * 100_000, mode="lexical")
    assert endless["results"][0]["truncated"] is True


async def test_reciprocal_fusion_and_weights_change_the_scores(client: httpx.AsyncClient) -> None:
    reciprocal = await post(client, query="高血压", fusion="reciprocal")
    assert reciprocal["results"][0]["hits"][0]["score"] == pytest.approx(2 / 61, abs=1e-6)
    words_only = await post(client, query="高血压", weight=0)
    meaning_only = await post(client, query="高血压", weight=1.0)
    assert words_only["results"] != meaning_only["results"]


async def test_words_that_no_document_has_give_no_hits(client: httpx.AsyncClient) -> None:
    assert (await post(client, query="zzzz qqqq", mode="lexical"))["results"][0]["hits"] == []


@pytest.mark.parametrize("query", ["a\x00", "…", "😀", "a" * 5000, "<script>", '"', "\\", "\u202e高血压", "ﬁ²①ＡＢＣ"])
async def test_unusual_texts_are_accepted_as_queries(client: httpx.AsyncClient, query: str) -> None:
    answer = await post(client, query=query)
    assert len(answer["results"][0]["hits"]) == len(ENTRIES)


async def test_server_timing_and_the_answer_give_the_same_numbers(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/search", json={"query": "骨折"})
    durations = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    timings = response.json()["timings_ms"]
    assert {stage: float(ms) for stage, ms in durations.items()} == timings
    assert timings["total"] >= sum(timings[stage] for stage in STAGES[:-1]) - 0.01
