"""What is sent for each call and how its answer is read: shared by both clients. Sends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

import httpx

from care_client.answers import Changes, Collection, Document, Embeddings, Health, Ranked, SearchAnswer
from care_client.exchange import Reply, body_of, checked, parsed, pause
from care_client.retry import Attempts

T = TypeVar("T")
Texts = str | Sequence[str]
InputType = Literal["query", "document"]
NDJSON = "application/x-ndjson"


class SearchOptions(TypedDict, total=False):
    """The parameters of a search; for those that are left out, the service's defaults hold."""

    top_k: int
    offset: int
    facets: Sequence[str]
    mode: Literal["dense", "lexical", "hybrid"]
    fields: Sequence[Literal["title", "snippet", "metadata", "text"]]
    filters: Sequence[Mapping[str, Any]]
    fusion: Literal["scores", "reciprocal"]
    weight: float
    min_score: float
    passages: int
    explain: bool
    hyde: bool | Mapping[str, int]
    timeout_ms: int
    bulk: bool
    cache: bool


class NewDocument(TypedDict, total=False):
    """A document to add: an id, named `id` or `_id`, and a text or a title."""

    id: str
    _id: str
    title: str
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, and the reading of its reply. Every call may be repeated: it reads, or says twice what holds once.

    `answers` are the statuses whose body `parse` reads; any other is an error.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    answers: frozenset[int] = frozenset({200})

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        return http.build_request(self.method, self.path, json=self.body, headers=self.headers)

    def pause(self, reply: Reply, attempts: Attempts) -> float | None:
        """Seconds to wait before the next attempt; None where this reply is the last."""
        return pause(reply, attempts, self.answers)

    def checked(self, reply: Reply) -> httpx.Response:
        """The response where it is an answer; raises where it is not."""
        return checked(reply, self.answers)

    def read(self, reply: Reply) -> T:
        """The answer; raises where the reply is none."""
        return parsed(self.parse, body_of(self.checked(reply)))


def search(query: Texts, options: SearchOptions) -> Call[SearchAnswer]:
    return Call("POST", "/v1/search", SearchAnswer.parse, {"query": _plain(query), **options})


def stream(queries: Sequence[str], options: SearchOptions) -> Call[None]:
    """Its answer comes in lines, which `exchange.Lines` reads."""
    body = {"query": list(queries), **options}
    return Call("POST", "/v1/search", lambda json: None, body, {"accept": NDJSON})


def document(id: str) -> Call[Document]:
    return Call("GET", f"/v1/documents/{quote(id, safe='')}", Document.parse)


def add_documents(documents: Sequence[NewDocument]) -> Call[Changes]:
    return Call("POST", "/v1/documents", Changes.parse, {"documents": [dict(document) for document in documents]})


def delete_document(id: str) -> Call[Changes]:
    return Call("DELETE", f"/v1/documents/{quote(id, safe='')}", Changes.parse)


def collection() -> Call[Collection]:
    return Call("GET", "/v1/collection", Collection.parse)


def embeddings(texts: Texts, input_type: InputType, dimensions: int | None) -> Call[Embeddings]:
    # In base64 a vector takes a quarter of the bytes, and no bit is lost in decimals.
    body: dict[str, Any] = {"input": _plain(texts), "input_type": input_type, "encoding_format": "base64"}
    if dimensions is not None:
        body["dimensions"] = dimensions
    return Call("POST", "/v1/embeddings", Embeddings.parse, body)


def rerank(query: str, documents: Sequence[str], top_n: int | None) -> Call[tuple[Ranked, ...]]:
    body: dict[str, Any] = {"query": query, "documents": list(documents)}
    if top_n is not None:
        body["top_n"] = top_n
    return Call("POST", "/v1/rerank", Ranked.parse_all, body)


def health() -> Call[Health]:
    return Call("GET", "/readyz", Health.parse, answers=frozenset({200, 503}))


def _plain(texts: Texts) -> str | list[str]:
    return texts if isinstance(texts, str) else list(texts)
