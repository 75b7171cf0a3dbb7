"""/v1/embeddings, /v1/rerank and /v1/models through the app: shapes, bounds and meaning of the numbers."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import EncoderSpec, Side
from service.http.texts import WRITTEN_TOGETHER, EncodingFormat, write_vectors
from service.settings import Settings
from tests.api.gate import Gate
from tests.api.support import ENCODER, Built, make_settings, running
from tests.api.test_errors import check

pytestmark = pytest.mark.anyio

TEXTS = ["高血压吃什么药", "氨氯地平是治疗高血压的常用药", "Asthma causes wheezing"]


async def embed(client: httpx.AsyncClient, **body: object) -> dict[str, Any]:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def rerank(client: httpx.AsyncClient, **body: object) -> list[dict[str, Any]]:
    response = await client.post("/v1/rerank", json=body)
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"model", "results", "usage"}
    return response.json()["results"]


def vectors_of(answer: dict[str, Any]) -> np.ndarray:
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


async def test_embeddings_equal_those_of_the_encoder(client: httpx.AsyncClient, encoder: OnnxEncoder) -> None:
    answer = await embed(client, input=TEXTS, model="care-small-zh")
    assert list(answer) == ["object", "data", "model", "usage"]
    assert (answer["object"], answer["model"]) == ("list", "care-small-zh")
    assert [(each["object"], each["index"]) for each in answer["data"]] == [("embedding", n) for n in range(3)]
    expected = encoder.encode(TEXTS, Side.QUERY)
    # An int8 graph scales a batch as a whole, so a vector depends a little on the rest of its batch.
    assert np.einsum("nd,nd->n", vectors_of(answer), expected) == pytest.approx(1, abs=0.01)
    assert np.linalg.norm(vectors_of(answer), axis=1) == pytest.approx(1, abs=1e-5)
    tokens = sum(len(tokens) for tokens in encoder.tokenize(TEXTS, Side.QUERY))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_one_text_needs_no_list(client: httpx.AsyncClient) -> None:
    alone, listed = await embed(client, input=TEXTS[0]), await embed(client, input=[TEXTS[0]])
    assert alone == listed


async def test_base64_holds_the_same_floats(client: httpx.AsyncClient) -> None:
    as_floats = vectors_of(await embed(client, input=TEXTS[0]))
    (packed,) = (await embed(client, input=TEXTS[0], encoding_format="base64"))["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), as_floats[0])


async def test_fewer_dimensions_are_the_first_ones_normalised_again(client: httpx.AsyncClient) -> None:
    whole = vectors_of(await embed(client, input=TEXTS[:1]))[0]
    (short,) = vectors_of(await embed(client, input=TEXTS[:1], dimensions=64))
    assert short == pytest.approx(whole[:64] / np.linalg.norm(whole[:64]), abs=1e-6)


async def test_many_texts_go_through_a_small_queue_in_their_order(built: Built, gate: Gate) -> None:
    texts = [f"头痛 {number}" for number in range(100)]
    async with running(make_settings(built, threads=1, reload_seconds=0, queue_limit=8, max_queries=8)) as client:
        many = vectors_of(await embed(client, input=texts, input_type="document"))
        alone = vectors_of(await embed(client, input=texts[70], input_type="document"))
    assert np.argmax(many @ alone[0]) == 70


async def test_embeddings_of_queries_are_cached_and_those_of_documents_are_not(built: Built, gate: Gate) -> None:
    async with running(make_settings(built, threads=1, reload_seconds=0, lru_mb=1)) as client:
        before = len(gate.jobs)
        first = await embed(client, input=TEXTS)
        assert await embed(client, input=TEXTS) == first
        assert len(gate.jobs) - before == 3
        for _ in range(2):
            await embed(client, input=TEXTS, input_type="document")
        assert len(gate.jobs) - before == 9


async def test_rerank_orders_by_the_cosine_of_query_and_document(
    client: httpx.AsyncClient, encoder: OnnxEncoder
) -> None:
    documents = ["骨折要固定。", TEXTS[1], {"text": TEXTS[2], "title": "ignored"}]
    results = await rerank(client, query=TEXTS[0], documents=documents)
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert results[0]["index"] == 1
    query, document = encoder.encode([TEXTS[0]], Side.QUERY)[0], encoder.encode([TEXTS[1]], Side.DOCUMENT)[0]
    assert results[0]["relevance_score"] == pytest.approx(float(query @ document), abs=0.02)
    assert "document" not in results[0]


async def test_rerank_returns_the_best_documents_with_their_texts(client: httpx.AsyncClient) -> None:
    documents = ["骨折要固定。", {"text": TEXTS[1]}]
    (best,) = await rerank(client, query=TEXTS[0], documents=documents, top_n=1, return_documents=True)
    assert best["document"] == {"text": TEXTS[1]}
    assert len(await rerank(client, query=TEXTS[0], documents=documents, top_n=50)) == 2


async def test_equal_documents_keep_their_order(client: httpx.AsyncClient) -> None:
    results = await rerank(client, query=TEXTS[0], documents=[TEXTS[1]] * 3)
    assert [result["index"] for result in results] == [0, 1, 2]


async def test_models_name_the_encoder(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("care-small-zh", "model", "care-search")
    assert (await client.get("/v1/models/care-small-zh")).json() == model
    check(await client.get("/v1/models/other"), 404, "not_found")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("embeddings", {}, "input"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": ""}, "input"),
        ("embeddings", {"input": ["好", " "]}, "input"),
        ("embeddings", {"input": [1, 2, 3]}, "input"),
        ("embeddings", {"input": [[1, 2], [3]]}, "input"),
        ("embeddings", {"input": ["好"] * 2049}, "input"),
        ("embeddings", {"input": "好", "dimensions": 0}, "dimensions"),
        ("embeddings", {"input": "好", "dimensions": 513}, "dimensions"),
        ("embeddings", {"input": "好", "encoding_format": "hex"}, "encoding_format"),
        ("embeddings", {"input": "好", "input_type": "passage"}, "input_type"),
        ("embeddings", {"input": "好", "colour": "red"}, "colour"),
        ("rerank", {"documents": ["好"]}, "query"),
        ("rerank", {"query": " ", "documents": ["好"]}, "query"),
        ("rerank", {"query": "好"}, "documents"),
        ("rerank", {"query": "好", "documents": []}, "documents"),
        ("rerank", {"query": "好", "documents": ["好", ""]}, "documents"),
        ("rerank", {"query": "好", "documents": [{"body": "好"}]}, "documents"),
        ("rerank", {"query": "好", "documents": ["好"] * 2049}, "documents"),
        ("rerank", {"query": "好", "documents": ["好"], "top_n": 0}, "top_n"),
    ],
)
async def test_a_wrong_field_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], field: str) -> None:
    message = check(await client.post(f"/v1/{path}", json=body), 422, "invalid_request", field)
    assert message.startswith((f"{field}: ", f"{field}["))


async def test_token_arrays_are_refused_with_the_remedy(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"input": [[101, 102]]})
    assert "send texts" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["embeddings", "rerank"])
async def test_an_unknown_model_name_is_refused(client: httpx.AsyncClient, path: str) -> None:
    body = {"input": "好"} if path == "embeddings" else {"query": "好", "documents": ["好"]}
    response = await client.post(f"/v1/{path}", json=body | {"model": "text-embedding-3-small"})
    assert "care-small-zh" in check(response, 404, "not_found")


async def test_an_empty_text_is_named_by_its_place(client: httpx.AsyncClient) -> None:
    for path, body, field, place in (
        ("embeddings", {"input": " "}, "input", "input"),
        ("embeddings", {"input": ["a", ""]}, "input", "input[1]"),
        ("rerank", {"query": "a", "documents": ["", "b"]}, "documents", "documents[0]"),
    ):
        message = check(await client.post(f"/v1/{path}", json=body), 422, "invalid_request", field)
        assert message == f"{place}: must not be empty"


async def test_bodies_that_cannot_be_read_are_refused(client: httpx.AsyncClient) -> None:
    check(await client.post("/v1/embeddings", content=b"{"), 422, "invalid_request", "body")
    check(await client.post("/v1/embeddings", content=b'{"input": "\xff"}'), 422, "invalid_request", "body")
    check(await client.post("/v1/rerank", content=b"x" * (2 * 1024 * 1024 + 1)), 413, "body_too_large")
    check(await client.get("/v1/rerank"), 405, "method_not_allowed")


async def test_a_query_encoder_refuses_documents_but_reranks(built: Built, tmp_path: Path) -> None:
    folder = tmp_path / "query-encoder"
    folder.mkdir()
    for file in ENCODER.resolve().iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "encoder.json").unlink()
    EncoderSpec.load(ENCODER).model_copy(update={"sides": (Side.QUERY,)}).save(folder)
    settings = Settings(collection=built.root, encoder=folder, threads=1, reload_seconds=0)
    async with running(settings) as client:
        response = await client.post("/v1/embeddings", json={"input": "好", "input_type": "document"})
        assert "query" in check(response, 422, "invalid_request", "input_type")
        assert (await embed(client, input="好"))["model"] == "query-encoder"
        assert len(await rerank(client, query="好", documents=["好", "坏"])) == 2


async def test_without_a_snapshot_there_are_no_embeddings(tmp_path: Path) -> None:
    settings = Settings(collection=tmp_path / "empty", encoder=ENCODER, threads=1, reload_seconds=0)
    async with running(settings) as client:
        for path in ("/v1/models", "/v1/models/care-small-zh"):
            check(await client.get(path), 503, "not_ready")
        check(await client.post("/v1/embeddings", json={"input": "好"}), 503, "not_ready")


async def test_the_event_loop_runs_while_many_vectors_are_serialised() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    vectors = np.eye(10 * WRITTEN_TOGETHER, 4, dtype=np.float32)
    written = await write_vectors(vectors, EncodingFormat.FLOAT)
    other.cancel()
    assert turns >= 10
    assert [json.loads(each)["embedding"] for each in written] == vectors.tolist()
