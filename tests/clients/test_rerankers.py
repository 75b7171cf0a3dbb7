"""The rerankers of LangChain and LlamaIndex, through their frameworks' entry points, against the real service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from care_client import AsyncCareClient, CareClient
from care_client.langchain import CareReranker as LangChainReranker
from care_client.llamaindex import CareReranker as LlamaIndexReranker
from langchain_core.documents import Document
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

pytestmark = pytest.mark.anyio
QUERY = "高血压吃什么药"
TEXTS = ["怀疑骨折时不要移动患肢。", "血常规检查白细胞。", "氨氯地平是治疗高血压的常用药。"]


@pytest.fixture
def plain(service_url: str) -> Iterator[CareClient]:
    with CareClient(service_url) as client:
        yield client


def check_documents(documents: list[Document]) -> None:
    assert [document.id for document in documents] == ["2", documents[1].id]
    scores = [document.metadata["relevance_score"] for document in documents]
    assert scores == sorted(scores, reverse=True)
    assert documents[0].metadata["own"] == 2


async def test_langchain_keeps_the_best_documents_in_order(plain: CareClient, service_url: str) -> None:
    given = [Document(id=str(place), page_content=text, metadata={"own": place}) for place, text in enumerate(TEXTS)]
    check_documents(LangChainReranker(client=plain, top_n=2).compress_documents(given, QUERY))
    async with AsyncCareClient(service_url) as client:
        for reranker in (LangChainReranker(client=plain, async_client=client, top_n=2),
                         LangChainReranker(client=plain, top_n=2)):  # fmt: skip
            check_documents(await reranker.acompress_documents(given, QUERY))
            assert await reranker.acompress_documents([], QUERY) == []
    assert all("relevance_score" not in document.metadata for document in given)
    assert len(LangChainReranker(client=plain).compress_documents(given, QUERY)) == 3


class FixedRetriever(BaseRetriever):
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(id_=str(place), text=text), score=0.5) for place, text in enumerate(TEXTS)]


async def test_llamaindex_reorders_the_retrieved_nodes(plain: CareClient, service_url: str) -> None:
    async with AsyncCareClient(service_url) as client:
        for reranker in (LlamaIndexReranker(client=plain, async_client=client, top_n=2),
                         LlamaIndexReranker(client=plain, top_n=2)):  # fmt: skip
            engine = RetrieverQueryEngine.from_args(FixedRetriever(), llm=MockLLM(), node_postprocessors=[reranker])
            for answer in (engine.query(QUERY), await engine.aquery(QUERY)):
                nodes = answer.source_nodes
                assert nodes[0].node.node_id == "2"
                assert len(nodes) == 2
                assert nodes[0].score > nodes[1].score
            assert reranker.postprocess_nodes([], query_str=QUERY) == []
    with pytest.raises(ValueError, match="query_str"):
        LlamaIndexReranker(client=plain).postprocess_nodes(FixedRetriever().retrieve(QUERY))
