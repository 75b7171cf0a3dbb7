"""CARE Search as a LangChain retriever. Needs langchain-core: `pip install care-search[langchain]`."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from care_client.aio import AsyncCareClient
from care_client.answers import Hit
from care_client.client import CareClient
from care_client.retrieval import content_of, metadata_of, search_options


class CareRetriever(BaseRetriever):
    """Finds documents for a query; each carries `id`, `title` and `score` in its metadata.

    `passages` 0 gives whole documents, more gives up to so many matching passages of each. `options` are further
    parameters of the search, such as `{"mode": "dense", "filters": [{"field": "kind", "eq": "drug"}]}`. Without an
    `async_client`, `ainvoke` asks the plain one from a thread.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: CareClient
    async_client: AsyncCareClient | None = None
    top_k: int = 4
    passages: int = 0
    options: dict[str, Any] = Field(default_factory=dict)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        answer = self.client.search(query, **search_options(self.top_k, self.passages, self.options))
        return [_document(hit) for hit in answer.hits]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        if self.async_client is None:
            return await super()._aget_relevant_documents(query, run_manager=run_manager)
        answer = await self.async_client.search(query, **search_options(self.top_k, self.passages, self.options))
        return [_document(hit) for hit in answer.hits]


def _document(hit: Hit) -> Document:
    return Document(id=hit.id, page_content=content_of(hit), metadata=metadata_of(hit))
