"""CARE Search as a LlamaIndex retriever and reranker. Needs llama-index-core: `pip install care-search[llamaindex]`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from care_client.answers import Hit, Ranked
from care_client.client import AsyncCareClient, CareClient
from care_client.retrieval import content_of, metadata_of, search_options


class CareRetriever(BaseRetriever):
    """Finds nodes for a query; the metadata of each is its own, with `id`, `title` and `care_score` added.

    `passages` 0 gives whole documents, more gives up to that many matching passages of each. `options` are any
    parameters of the search, such as `{"mode": "dense", "filters": [{"field": "kind", "eq": "drug"}]}`; they override
    the former. Without an `async_client`, `aretrieve` calls the plain one in a thread.
    """

    def __init__(
        self,
        client: CareClient,
        async_client: AsyncCareClient | None = None,
        *,
        top_k: int = 4,
        passages: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._client = client
        self._async_client = async_client
        self._search_options = search_options({"top_k": top_k, "passages": passages}, options or {})

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        answer = self._client.search(query_bundle.query_str, **self._search_options)
        return [_node(hit) for hit in answer.hits]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if self._async_client is None:
            return await asyncio.to_thread(self._retrieve, query_bundle)
        answer = await self._async_client.search(query_bundle.query_str, **self._search_options)
        return [_node(hit) for hit in answer.hits]


class CareReranker(BaseNodePostprocessor):
    """Orders nodes by how well they answer the query, and keeps the best `top_n` (all, if None); sets their scores.

    Without an `async_client`, the asynchronous call uses the plain one in a thread.
    """

    client: CareClient
    async_client: AsyncCareClient | None = None
    top_n: int | None = None

    @classmethod
    def class_name(cls) -> str:
        return "CareReranker"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        return _reordered(nodes, self.client.rerank(query, _texts(nodes), top_n=self.top_n)) if nodes else []

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if self.async_client is None or not nodes:
            return await asyncio.to_thread(self._postprocess_nodes, nodes, query_bundle)
        ranked = await self.async_client.rerank(_query(query_bundle), _texts(nodes), top_n=self.top_n)
        return _reordered(nodes, ranked)


def _query(bundle: QueryBundle | None) -> str:
    if bundle is None:
        raise ValueError("a reranker needs the query: pass query_bundle or query_str")
    return bundle.query_str


def _texts(nodes: Sequence[NodeWithScore]) -> list[str]:
    return [node.node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]


def _reordered(nodes: Sequence[NodeWithScore], ranked: Sequence[Ranked]) -> list[NodeWithScore]:
    return [NodeWithScore(node=nodes[place.index].node, score=place.score) for place in ranked]


def _node(hit: Hit) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=hit.id, text=content_of(hit), metadata=metadata_of(hit)), score=hit.score)
