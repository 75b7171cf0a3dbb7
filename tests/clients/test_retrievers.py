"""The retrievers of LangChain and LlamaIndex, through their frameworks' own entry points, against the real service."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from care_client import AsyncCareClient, CareClient, Hit, Passage
from care_client.langchain import CareRetriever as LangChainRetriever
from care_client.llamaindex import CareRetriever as LlamaIndexRetriever
from care_client.retrieval import content_of
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from llama_index.core.schema import NodeWithScore

from tests.api.support import AS_ADMIN

pytestmark = pytest.mark.anyio

FIRST_AID: dict[str, Any] = {"mode": "dense", "filters": [{"field": "kind", "eq": "first-aid"}]}


@pytest.fixture
def plain(service_url: str) -> Iterator[CareClient]:
    with CareClient(service_url, headers=AS_ADMIN) as client:
        yield client


def check_document(document: Document) -> None:
    assert document.id == document.metadata["id"] == "a-1"
    assert document.metadata["title"] == "高血压用药"
    assert document.metadata["kind"] == "drug"
    assert document.metadata["care_score"] > 0
    assert "氨氯地平" in document.page_content


def test_langchain_finds_documents(plain: CareClient) -> None:
    documents = LangChainRetriever(client=plain, top_k=2).invoke("高血压吃什么药")
    assert len(documents) == 2
    check_document(documents[0])


async def test_langchain_finds_documents_asynchronously(plain: CareClient, service_url: str) -> None:
    async with AsyncCareClient(service_url) as client:
        both = LangChainRetriever(client=plain, async_client=client, top_k=1)
        alone = LangChainRetriever(client=plain, top_k=1)
        for retriever in (both, alone):
            (document,) = await retriever.ainvoke("高血压吃什么药")
            check_document(document)


def test_langchain_filters_and_chains(plain: CareClient) -> None:
    retriever = LangChainRetriever(client=plain, top_k=5, options=FIRST_AID)
    chain = retriever | RunnableLambda(lambda documents: [document.id for document in documents])
    assert set(chain.invoke("怎么急救")) == {"a-4", "a-5"}


def test_langchain_takes_k_and_search_kwargs_at_construction(plain: CareClient) -> None:
    drugs = {"k": 8, "filter": {"kind": "drug"}}
    assert len(LangChainRetriever(client=plain, k=2).invoke("头痛")) == 2
    assert ids(LangChainRetriever(client=plain, search_kwargs=drugs).invoke("头痛")) == {"a-1", "a-3"}
    some = LangChainRetriever(client=plain, search_kwargs={"k": 8, "filter": {"kind": ["test", "first-aid"]}})
    assert ids(some.invoke("头痛")) == {"a-4", "a-5", "a-8"}


async def test_langchain_takes_k_and_search_kwargs_for_one_call(plain: CareClient, service_url: str) -> None:
    async with AsyncCareClient(service_url) as client:
        for retriever in (LangChainRetriever(client=plain, async_client=client), LangChainRetriever(client=plain)):
            for call in ({"k": 3}, {"top_k": 3}, {"search_kwargs": {"k": 3}}, {"search_kwargs": {"k": 5}, "k": 3}):
                assert len(retriever.invoke("头痛", **call)) == 3
                assert len(await retriever.ainvoke("头痛", **call)) == 3
                assert len(retriever.bind(**call).invoke("头痛")) == 3
            clauses = [{"not": {"field": "kind", "in": ["drug", "disease", "test"]}}]
            assert ids(retriever.invoke("头痛", filter=clauses, mode="dense")) == {"a-4", "a-5"}
            best = retriever.invoke("头痛", k=1)[0].metadata["care_score"]
            assert len(await retriever.ainvoke("头痛", score_threshold=best)) == 1
            assert len(retriever.invoke("头痛")) == 4


def test_none_is_the_services_default(plain: CareClient) -> None:
    """Frameworks and language models write None for what they do not want."""
    drugs = LangChainRetriever(client=plain, search_kwargs={"filter": {"kind": "drug"}, "score_threshold": None})
    assert ids(drugs.invoke("头痛", mode=None)) == {"a-1", "a-3"}
    assert len(drugs.invoke("头痛", filter=None, k=None)) == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kk": 3}, "did you mean k"),
        ({"search_type": "mmr"}, "search_type: the retriever has no such search parameter; there are bulk, "),
        ({"fields": ["title"]}, "did you mean filters"),
        ({"k": 3, "top_k": 3}, "top_k: given twice"),
    ],
)
def test_a_retriever_refuses_unknown_search_parameters(plain: CareClient, given: dict[str, Any], message: str) -> None:
    retriever = LangChainRetriever(client=plain)
    for refused in (
        lambda: retriever.invoke("头痛", **given),
        lambda: retriever.invoke("头痛", search_kwargs=given),
        lambda: LangChainRetriever(client=plain, search_kwargs=given),
        lambda: LlamaIndexRetriever(plain, options=given),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    with pytest.raises(ValueError, match=r"Extra inputs|kk|search_type|fields|top_k"):
        LangChainRetriever(client=plain, **given)


def test_metadata_named_like_result_fields_is_kept(plain: CareClient) -> None:
    own = {"score": 7, "id": "mine", "title": "own title"}
    plain.add_documents([{"_id": "scored", "title": "评分量表", "text": "评分量表的说明。", "metadata": own}])
    try:
        (document,) = LangChainRetriever(client=plain, k=1).invoke("评分量表")
        (node,) = LlamaIndexRetriever(plain, top_k=1).retrieve("评分量表")
    finally:
        plain.delete_document("scored")
    assert {name: document.metadata[name] for name in own} == {name: node.metadata[name] for name in own} == own
    assert (document.id, node.node.node_id) == ("scored", "scored")
    assert document.metadata["care_score"] == node.score != 7


def ids(documents: list[Document]) -> set[str | None]:
    return {document.id for document in documents}


def check_node(node: NodeWithScore) -> None:
    assert node.node.node_id == node.metadata["id"] == "a-1"
    assert node.metadata["kind"] == "drug"
    assert node.score == node.metadata["care_score"]
    assert "氨氯地平" in node.text


def test_llamaindex_finds_nodes(plain: CareClient) -> None:
    nodes = LlamaIndexRetriever(plain, top_k=2).retrieve("高血压吃什么药")
    assert len(nodes) == 2
    check_node(nodes[0])


async def test_llamaindex_finds_nodes_asynchronously(plain: CareClient, service_url: str) -> None:
    async with AsyncCareClient(service_url) as client:
        for retriever in (LlamaIndexRetriever(plain, client, top_k=1), LlamaIndexRetriever(plain, top_k=1)):
            (node,) = await retriever.aretrieve("高血压吃什么药")
            check_node(node)


def test_llamaindex_filters(plain: CareClient) -> None:
    nodes = LlamaIndexRetriever(plain, top_k=5, options=FIRST_AID).retrieve("怎么急救")
    assert {node.node.node_id for node in nodes} == {"a-4", "a-5"}


def test_passages_of_a_long_document_are_less_than_the_whole(plain: CareClient) -> None:
    (whole,) = LangChainRetriever(client=plain, top_k=1).invoke("头痛休息和补水")
    (some,) = LangChainRetriever(client=plain, top_k=1, passages=1).invoke("头痛休息和补水")
    assert whole.id == some.id == "a-6"
    assert 0 < len(some.page_content) < len(whole.page_content)
    assert some.page_content in whole.page_content


def test_overlapping_passages_are_joined() -> None:
    def hit(*spans: tuple[int, int]) -> Hit:
        passages = tuple(Passage(start, end, 0.5, None, (), None) for start, end in spans)
        return Hit("1", 0.5, text="0123456789", passages=passages)

    assert content_of(hit((6, 9), (0, 3), (2, 5))) == "01234\n\n678"
    assert content_of(hit((0, 3), (3, 5), (1, 2))) == "01234"
    assert content_of(hit()) == "0123456789"


@pytest.mark.parametrize("passages", [(), (Passage(0, 0, 1.0, None, (), None),)])
def test_the_content_of_a_document_without_a_text_is_its_title(passages: tuple[Passage, ...]) -> None:
    # A reranker refuses an empty text, and with it all the others.
    assert content_of(Hit("1", 1.0, title="发热", text="", passages=passages)) == "发热"


def test_importing_the_client_loads_neither_frameworks_nor_the_service() -> None:
    code = "import sys, care_client; print({name.partition('.')[0] for name in sys.modules})"
    folder = Path(__file__).parents[2] / "clients"
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(run.stdout)
    assert "httpx" in loaded
    assert not loaded & {"langchain_core", "llama_index", "pydantic", "numpy", "models", "indexer", "service"}
