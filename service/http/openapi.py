"""The OpenAPI document: FastAPI's own, and routes that only describe those which FastAPI does not parse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from service.http import documents, search, texts
from service.http.admin import require_admin
from service.http.asgi import errors
from service.http.documents import ChangesAnswer, DocumentsRequest
from service.http.texts import EmbeddingsAnswer, EmbeddingsRequest, RerankAnswer, RerankRequest
from service.search.request import HydeStatus, SearchRequest
from service.settings import Settings

SCHEMAS = "#/components/schemas/"
# Parameters of the query string that differ from the body's fields.
QUERY_STRING: dict[str, dict[str, Any]] = {
    "q": {
        "description": "A query; repeat it for several.",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
        "example": "高血压吃什么药",
    },
    "fields": {
        "description": "What a hit shows beside id and score, separated by commas.",
        "schema": {"type": "string", "default": "title,snippet,metadata"},
    },
    "facets": {
        "description": "Metadata fields whose values are counted, separated by commas.",
        "schema": {"type": "string"},
        "example": "kind",
    },
    "filter": {
        "description": "field:operator:value with eq, in (values separated by commas), gte, gt, lte or lt; "
        "field:not.operator:value negates; may repeat. Only a body can hold any.",
        "schema": {"type": "array", "items": {"type": "string"}},
        "example": ["kind:eq:drug"],
    },
}
NOT_IN_QUERY_STRING = ("query", "filters", "fields", "facets")


class PassageHit(BaseModel):
    """A passage of a document that was found."""

    span: tuple[int, int] = Field(description="First and last-plus-one character in the document's text.")
    score: float = Field(description="The passage's own, in the ranking of passages.")
    snippet: str | None = None
    highlights: list[tuple[int, int]] | None = None
    text: str | None = None


class Placing(BaseModel):
    """Where a document stands in the ranking of one side."""

    rank: int
    score: float


class Explanation(BaseModel):
    """How a hit came to its score; null for a side that did not find it, or did not look."""

    dense: Placing | None
    lexical: Placing | None
    weight: float | None = Field(description="The dense side's share in this query's fusion by scores.")


class Hit(BaseModel):
    """A document that was found."""

    id: str
    score: float
    title: str | None = None
    metadata: dict[str, Any] | None = None
    snippet: str | None = Field(None, description="The passage around the words of the query that it holds.")
    highlights: list[tuple[int, int]] | None = Field(None, description="Characters of the snippet that match.")
    text: str | None = None
    headline: str | None = Field(None, description="The title, or the beginning of the text if it has none.")
    passages: list[PassageHit] | None = None
    explain: Explanation | None = None


class Result(BaseModel):
    """The ranking of one query."""

    hits: list[Hit]
    truncated: bool = Field(description="Whether the query was longer than the encoder reads, and was cut.")
    facets: dict[str, dict[str, int]] | None = Field(
        None, description="Documents per value, by field, the most frequent values first."
    )
    hyde: HydeStatus | None = None


class StageTimings(BaseModel):
    """Milliseconds per stage; `queue` includes the way to the engine and back."""

    tokenize: float
    queue: float
    encode: float
    search: float
    fetch: float
    total: float


class StreamEnd(BaseModel):
    """The last line of a streamed answer."""

    snapshot: str
    timings_ms: StageTimings


class SearchAnswer(BaseModel):
    """One result per query, in the order asked, all from one snapshot."""

    results: list[Result]
    snapshot: str
    timings_ms: StageTimings


SEARCHES = {
    "one query": {"query": "高血压吃什么药", "top_k": 5},
    "several queries": {
        "query": ["发烧怎么办", "chest pain first aid"],
        "mode": "dense",
        "fields": ["title", "text"],
    },
    "filters": {
        "query": "感冒",
        "filters": [
            {"field": "kind", "eq": "drug"},
            {"field": "department", "in": ["呼吸内科", "全科"]},
            {"field": "updated", "gte": "2025-01-01", "lt": "2026-01-01"},
        ],
    },
    "not and any": {
        "query": "感冒",
        "filters": [
            {"not": {"field": "kind", "eq": "test"}},
            {"any": [{"field": "department", "eq": "儿科"}, {"field": "updated", "gte": "2025-01-01"}]},
        ],
    },
    "the second page, with counts": {"query": "感冒", "top_k": 10, "offset": 10, "facets": ["kind"]},
    "passages for a language model": {
        "query": "糖尿病人能吃水果吗",
        "top_k": 3,
        "passages": 2,
        "min_score": 0.2,
        "fields": ["title", "text"],
        "timeout_ms": 2000,
    },
    "why these hits": {"query": "心绞痛", "explain": True, "weight": 0.5},
}
SEARCH_HIT = {
    "score": 0.931207,
    "id": "drug-001",
    "title": "氨氯地平",
    "metadata": {"kind": "drug", "department": "心血管内科", "updated": "2025-06-01"},
    "snippet": "用于治疗高血压和心绞痛……",
    "highlights": [[4, 7]],
}
SNAPSHOT = "20261115T041500123Z-1a2b3c4d"
SEARCH_TIMES = {"tokenize": 0.05, "queue": 0.12, "encode": 1.9, "search": 0.4, "fetch": 0.1, "total": 2.6}
SEARCH_ANSWER = {
    "results": [{"hits": [SEARCH_HIT], "truncated": False}],
    "snapshot": SNAPSHOT,
    "timings_ms": SEARCH_TIMES,
}
EMBEDDINGS = {
    "one text": {"input": "高血压吃什么药"},
    "documents, shortened": {
        "input": ["氨氯地平用于治疗高血压。", "布洛芬用于退热。"],
        "input_type": "document",
        "dimensions": 256,
        "encoding_format": "base64",
    },
}
EMBEDDINGS_ANSWER = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.0132, -0.0471, 0.0289]}],
    "model": "care-small-zh",
    "usage": {"prompt_tokens": 9, "total_tokens": 9},
}
RERANKS = {
    "texts": {
        "query": "发烧怎么办",
        "documents": ["布洛芬用于退热。", "氨氯地平用于治疗高血压。"],
        "top_n": 1,
        "return_documents": True,
    },
    "objects": {"query": "chest pain", "documents": [{"text": "Angina is chest pain."}, {"text": "A sprain."}]},
}
RERANK_ANSWER = {
    "model": "care-small-zh",
    "results": [{"index": 0, "relevance_score": 0.712384, "document": {"text": "布洛芬用于退热。"}}],
    "usage": {"prompt_tokens": 31, "total_tokens": 31},
}
NOTICE = {
    "id": "notice-2026-11",
    "title": "缬沙坦批次召回",
    "text": "因检出杂质，部分批次的缬沙坦片自即日起召回。",
    "metadata": {"kind": "notice", "updated": "2026-11-15"},
}
DOCUMENTS = {
    "one document": {"documents": [NOTICE]},
    "several documents": {"documents": [{"id": "a", "text": "Take with food."}, {"id": "b", "title": "Only a title"}]},
}
LINES = {"schema": {"anyOf": [{"$ref": SCHEMAS + name} for name in ("Result", "StreamEnd", "ErrorAnswer")]}}
BUSY = (408, 413, 422, 429, 503, 504)


def _body(examples: Mapping[str, Any]) -> Any:  # noqa: ANN401 (what FastAPI's Body returns)
    return Body(openapi_examples={name: {"value": value} for name, value in examples.items()})


def _answers(example: Mapping[str, Any], *statuses: int) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"application/json": {"example": example}}
    return {200: {"description": "The answer", "content": content}, **errors(*statuses)}


SEARCH_ANSWERS = _answers(SEARCH_ANSWER, *BUSY)
SEARCH_ANSWERS[200]["content"]["application/x-ndjson"] = LINES
router = APIRouter()  # describes; requests never reach it


@router.get(search.PATH, tags=["search"], summary="Search, from a URL", responses=SEARCH_ANSWERS)
async def get_search() -> SearchAnswer:
    raise NotImplementedError


@router.post(search.PATH, tags=["search"], summary="Search", responses=SEARCH_ANSWERS)
async def post_search(request: Annotated[SearchRequest, _body(SEARCHES)]) -> SearchAnswer:
    raise NotImplementedError


@router.post(
    texts.EMBEDDINGS,
    tags=["texts"],
    summary="Embeddings, as OpenAI's",
    responses=_answers(EMBEDDINGS_ANSWER, 404, *BUSY),
)
async def post_embeddings(request: Annotated[EmbeddingsRequest, _body(EMBEDDINGS)]) -> EmbeddingsAnswer:
    raise NotImplementedError


@router.post(
    texts.RERANK,
    tags=["texts"],
    summary="Rerank, as Cohere's and Jina's",
    responses=_answers(RERANK_ANSWER, 404, *BUSY),
)
async def post_rerank(request: Annotated[RerankRequest, _body(RERANKS)]) -> RerankAnswer:
    raise NotImplementedError


@router.post(
    documents.PATH,
    tags=["documents"],
    summary="Add or replace documents",
    dependencies=[Depends(require_admin)],
    responses=_answers({"position": 42, "changed": 1, "snapshot": SNAPSHOT}, 403, 409, *BUSY),
)
async def post_documents(request: Annotated[DocumentsRequest, _body(DOCUMENTS)]) -> ChangesAnswer:
    raise NotImplementedError


def describe(app: FastAPI, settings: Settings) -> Callable[[], dict[str, Any]]:
    """Returns `app.openapi`: the document is made once, when /docs is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            routes = [*router.routes, *app.routes]
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=routes)
            models = schema["components"]["schemas"]
            models["StreamEnd"] = StreamEnd.model_json_schema(mode="serialization", ref_template=SCHEMAS + "{model}")
            models["StreamEnd"].pop("$defs")
            _bound(models, settings)
            schema["paths"][search.PATH]["get"]["parameters"] = _parameters(models["SearchRequest"]["properties"])
            app.openapi_schema = schema
        return app.openapi_schema

    return openapi


def _bound(models: Mapping[str, Any], settings: Settings) -> None:
    """Adds the bounds that are settings to the schemas."""
    fields = models["SearchRequest"]["properties"]
    fields["top_k"] |= {"minimum": 1, "maximum": settings.max_top_k}
    fields["offset"]["anyOf"][0] |= {"maximum": settings.max_top_k - 1}
    several = {"minItems": 1, "maxItems": settings.max_texts}
    models["DocumentsRequest"]["properties"]["documents"] |= several
    models["RerankRequest"]["properties"]["query"] |= {"minLength": 1}
    models["RerankRequest"]["properties"]["documents"] |= several
    inputs = models["EmbeddingsRequest"]["properties"]["input"]
    for field, most in ((fields["query"], settings.max_stream_queries), (inputs, settings.max_texts)):
        for form in field["anyOf"]:
            if form["type"] == "array":
                form |= {"minItems": 1, "maxItems": most}
                form["items"] |= {"minLength": 1}
            else:
                form |= {"minLength": 1}


def _parameters(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The query string of a search: its own parameters and the fields of the body."""
    parameters = [{"name": name, "in": "query"} | facts for name, facts in QUERY_STRING.items()]
    for name, field in fields.items():
        if name not in NOT_IN_QUERY_STRING:
            schema = {key: value for key, value in field.items() if key != "description"}
            if name == "hyde":
                schema = {"type": "boolean", "default": False}
            parameters.append({"name": name, "in": "query", "description": field["description"], "schema": schema})
    return parameters
