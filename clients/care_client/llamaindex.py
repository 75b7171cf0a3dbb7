"""CARE Search as a LlamaIndex retriever. Needs llama-index-core: `pip install care-search[llamaindex]`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from care_client.answers import Hit
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


def _node(hit: Hit) -> NodeWithScore:
    return NodeWithScore(node=TextNode(id_=hit.id, text=content_of(hit), metadata=metadata_of(hit)), score=hit.score)
