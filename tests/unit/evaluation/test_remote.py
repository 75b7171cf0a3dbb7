from collections.abc import Iterator
from typing import Any

import pytest

from models.endpoint import Endpoint
from models.errors import CareError
from models.evaluation.remote import Service
from models.evaluation.systems import NotApplicable
from tests.support.evaluation import PETS, RERANK, RETRIEVAL, STS
from tests.support.json_server import Body, JsonServer, Reply, json_server

COLLECTION: dict[str, Any] = {
    "documents": 2,
    "encoder": {"fingerprint": "abc", "dim": 2},
    "max_queries": 1,
    "max_top_k": 100,
    "default_mode": "hybrid",
}
FOUND = {"小猫": ["d1", "d2"], "小狗": ["d2"]}


def serve(path: str, body: Body) -> Reply:
    if path == "/v1/collection":
        return 200, COLLECTION
    assert body is not None
    if path == "/v1/rerank":
        return 200, {"results": [{"index": n, "relevance_score": 0.5} for n in range(len(body["documents"]))][::-1]}
    assert body["top_k"] == 100
    hits = [[{"id": id, "score": 1 / (n + 1)} for n, id in enumerate(FOUND[query])] for query in body["query"]]
    return 200, {"results": [{"hits": of_query, "truncated": False} for of_query in hits]}


@pytest.fixture
def server() -> Iterator[JsonServer]:
    with json_server(serve) as server:
        yield server


@pytest.fixture
def endpoint(server: JsonServer) -> Iterator[Endpoint]:
    endpoint = Endpoint(server.url, pause=lambda seconds: None)
    yield endpoint
    endpoint.close()


def test_hits_become_rankings_of_the_sets_rows(endpoint: Endpoint, server: JsonServer) -> None:
    service = Service(endpoint, None)
    assert [rows.tolist() for rows, _ in service.answer(RETRIEVAL)] == [[0, 1], [1]]
    assert service.online(RETRIEVAL, PETS)("小狗")[0].tolist() == [1]
    assert service.facts.name == "service hybrid"
    # No more queries at once than the service accepts.
    assert [body["query"] for _, body, _ in server.requests if body] == [["小猫"], ["小狗"], ["小狗"]]


def test_the_search_mode_can_be_set(endpoint: Endpoint, server: JsonServer) -> None:
    service = Service(endpoint, "dense")
    service.answer(RETRIEVAL)
    assert service.facts.name == "service dense"
    assert {body["mode"] for _, body, _ in server.requests if body} == {"dense"}


def test_a_service_is_used_for_reranking_but_not_for_sentence_pairs(endpoint: Endpoint, server: JsonServer) -> None:
    service = Service(endpoint, None)
    # Equal scores stay in the order of the answer.
    assert [rows.tolist() for rows, _ in service.answer(RERANK)] == [[1, 0], [1, 0]]
    assert server.requests[-1][:2] == ("/v1/rerank", {"query": "小狗", "documents": ["狗", "猫"]})
    with pytest.raises(NotApplicable, match="two sentences"):
        service.answer(STS)


def test_a_service_with_other_documents_is_an_error(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(COLLECTION, "documents", 3)
        with pytest.raises(CareError, match="serves 3 documents, pets has 2: build its collection"):
            Service(endpoint, None).answer(RETRIEVAL)
    monkeypatch.setitem(FOUND, "小狗", ["d9"])
    with pytest.raises(CareError, match="found document 'd9', which pets does not have"):
        Service(endpoint, None).answer(RETRIEVAL)


def test_a_service_that_returns_too_few_hits_is_refused(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTION, "max_top_k", 20)
    with pytest.raises(CareError, match="CARE_MAX_TOP_K=100"):
        Service(endpoint, None)


def test_another_kind_of_server_is_refused() -> None:
    with json_server(lambda path, body: (200, {"hello": "world"})) as other:
        endpoint = Endpoint(other.url)
        with pytest.raises(CareError, match="not that of a CARE Search service"):
            Service(endpoint, None)
        endpoint.close()
