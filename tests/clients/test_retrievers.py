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

pytestmark = pytest.mark.anyio

FIRST_AID: dict[str, Any] = {"mode": "dense", "filters": [{"field": "kind", "eq": "first-aid"}]}


@pytest.fixture
def plain(service_url: str) -> Iterator[CareClient]:
    with CareClient(service_url) as client:
        yield client


def check_document(document: Document) -> None:
    assert document.id == document.metadata["id"] == "a-1"
    assert document.metadata["title"] == "高血压用药"
    assert document.metadata["kind"] == "drug"
    assert document.metadata["score"] > 0
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


def check_node(node: NodeWithScore) -> None:
    assert node.node.node_id == node.metadata["id"] == "a-1"
    assert node.metadata["kind"] == "drug"
    assert node.score == node.metadata["score"]
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


def test_what_passages_share_is_said_once() -> None:
    def hit(*spans: tuple[int, int]) -> Hit:
        passages = tuple(Passage(start, end, 0.5, None, (), None) for start, end in spans)
        return Hit("1", 0.5, text="0123456789", passages=passages)

    assert content_of(hit((6, 9), (0, 3), (2, 5))) == "01234\n\n678"
    assert content_of(hit((0, 3), (3, 5), (1, 2))) == "01234"
    assert content_of(hit()) == "0123456789"


def test_the_client_alone_loads_neither_frameworks_nor_the_service() -> None:
    code = "import sys, care_client; print({name.partition('.')[0] for name in sys.modules})"
    folder = Path(__file__).parents[2] / "clients"
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(run.stdout)
    assert "httpx" in loaded
    assert not loaded & {"langchain_core", "llama_index", "pydantic", "numpy", "models", "indexer", "service"}
