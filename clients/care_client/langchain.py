"""CARE Search as a LangChain retriever and reranker. Needs langchain-core: `pip install care-search[langchain]`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun, Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.retrievers import BaseRetriever
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from care_client.answers import Hit, Ranked
from care_client.calls import SearchOptions
from care_client.client import AsyncCareClient, CareClient
from care_client.retrieval import RELEVANCE, content_of, metadata_of, search_options


class CareRetriever(BaseRetriever):
    """Finds documents for a query; the metadata of each is its own, with `id`, `title` and `care_score` added.

    `top_k`, also named `k`, is the number of documents. `passages` 0 gives whole documents, more gives up to that many
    matching passages of each. `search_kwargs`, also named `options`, are any parameters of the search, such as
    `{"k": 3, "filter": {"kind": "drug"}, "mode": "dense"}`; they override the former. `invoke` takes the same by name
    for one call. Without an `async_client`, `ainvoke` calls the plain one in a thread.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    client: CareClient
    async_client: AsyncCareClient | None = None
    top_k: int = Field(default=4, validation_alias=AliasChoices("top_k", "k"))
    passages: int = 0
    search_kwargs: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("search_kwargs", "options")
    )

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        self._options({})
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: object
    ) -> list[Document]:
        return [_document(hit) for hit in self.client.search(query, **self._options(kwargs)).hits]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: object
    ) -> list[Document]:
        options = self._options(kwargs)
        if self.async_client is None:
            answer = await asyncio.to_thread(self.client.search, query, **options)
        else:
            answer = await self.async_client.search(query, **options)
        return [_document(hit) for hit in answer.hits]

    def _options(self, given: Mapping[str, Any]) -> SearchOptions:
        """Returns the parameters of one call. `verbose` is LangChain's own."""
        call = {name: value for name, value in given.items() if name not in ("search_kwargs", "verbose")}
        own = {"top_k": self.top_k, "passages": self.passages}
        return search_options(own, self.search_kwargs, given.get("search_kwargs") or {}, call)


class CareReranker(BaseDocumentCompressor):
    """Orders documents by how well they answer a query, and keeps the best `top_n` (all, if None).

    Each document gets its score as `relevance_score` in the metadata. Without an `async_client`, the asynchronous call
    uses the plain one in a thread.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    client: CareClient
    async_client: AsyncCareClient | None = None
    top_n: int | None = None

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        if not documents:
            return []
        ranked = self.client.rerank(query, [document.page_content for document in documents], top_n=self.top_n)
        return _reordered(documents, ranked)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        if self.async_client is None or not documents:
            return await asyncio.to_thread(self.compress_documents, documents, query)
        texts = [document.page_content for document in documents]
        return _reordered(documents, await self.async_client.rerank(query, texts, top_n=self.top_n))


def _reordered(documents: Sequence[Document], ranked: Sequence[Ranked]) -> list[Document]:
    """Copies, best first: a document may be in use elsewhere."""
    pairs = [(documents[place.index], place.score) for place in ranked]
    return [each.model_copy(update={"metadata": each.metadata | {RELEVANCE: score}}) for each, score in pairs]


def _document(hit: Hit) -> Document:
    return Document(id=hit.id, page_content=content_of(hit), metadata=metadata_of(hit))
