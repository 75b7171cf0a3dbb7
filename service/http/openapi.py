"""Builds the OpenAPI document: FastAPI's own routes, and descriptions of those that FastAPI does not parse."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field

from service.http import documents, texts
from service.http.asgi import ERRORS, SEARCH_PATH, errors
from service.http.documents import DocumentsRequest
from service.http.middleware import scope_of
from service.http.texts import EmbeddingsAnswer, EmbeddingsRequest, RerankAnswer, RerankRequest
from service.search.request import HydeStatus, SearchRequest
from service.settings import Settings
from service.updates.writer import ChangesAnswer

SCHEMAS = "#/components/schemas/"
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
    rerank_score: float | None = Field(None, description="By the reranker, between 0 and 1, if it scored this hit.")
    title: str | None = None
    metadata: dict[str, Any] | None = None
    snippet: str | None = Field(None, description="The passage around the words of the query that it holds.")
    highlights: list[tuple[int, int]] | None = Field(None, description="Characters of the snippet that match.")
    text: str | None = None
    headline: str | None = Field(None, description="The title, or the beginning of the text if it has none.")
    passages: list[PassageHit] | None = None
    explain: Explanation | None = None


class RerankStatus(BaseModel):
    """How many of the first documents were to be reranked, and how many were scored in time; others kept their
    place."""

    depth: int
    scored: int


class Result(BaseModel):
    """The ranking of one query."""

    hits: list[Hit]
    truncated: bool = Field(description="Whether the query was longer than the encoder reads, and was cut.")
    facets: dict[str, dict[str, int]] | None = Field(
        None, description="Documents per value, by field, the most frequent values first."
    )
    hyde: HydeStatus | None = None
    rerank: RerankStatus | None = None


class StageTimings(BaseModel):
    """Milliseconds per stage; `queue` includes the way to the engine and back."""

    tokenize: float
    queue: float
    encode: float
    search: float
    rerank: float
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


# Requests and answers of the lean routes, and the parameters of a search that differ from its body.
EXAMPLES = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))
LINES = {"schema": {"anyOf": [{"$ref": SCHEMAS + name} for name in ("Result", "StreamEnd", "ErrorAnswer")]}}
BUSY = (408, 413, 422, 429, 503, 504)


def _body(name: str) -> Any:  # noqa: ANN401 (what FastAPI's Body returns)
    return Body(openapi_examples={title: {"value": value} for title, value in EXAMPLES[name]["requests"].items()})


def _answers(name: str, *statuses: int) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"application/json": {"example": EXAMPLES[name]["answer"]}}
    return {200: {"description": "The answer", "content": content}, **errors(*statuses)}


SEARCH_ANSWERS = _answers("search", *BUSY)
SEARCH_ANSWERS[200]["content"]["application/x-ndjson"] = LINES
router = APIRouter()  # describes the lean routes; requests never reach it
DESCRIBED = "this route is answered by plain ASGI (service/http/app.py), and only described here"


@router.get(SEARCH_PATH, tags=["search"], summary="Search, from a URL", responses=SEARCH_ANSWERS)
async def get_search() -> SearchAnswer:
    raise AssertionError(DESCRIBED)


@router.post(SEARCH_PATH, tags=["search"], summary="Search", responses=SEARCH_ANSWERS)
async def post_search(request: Annotated[SearchRequest, _body("search")]) -> SearchAnswer:
    raise AssertionError(DESCRIBED)


@router.post(
    texts.EMBEDDINGS, tags=["texts"], summary="Embeddings, as OpenAI's", responses=_answers("embeddings", 404, *BUSY)
)
async def post_embeddings(request: Annotated[EmbeddingsRequest, _body("embeddings")]) -> EmbeddingsAnswer:
    raise AssertionError(DESCRIBED)


@router.post(
    texts.RERANK, tags=["texts"], summary="Rerank, as Cohere's and Jina's", responses=_answers("rerank", 404, *BUSY)
)
async def post_rerank(request: Annotated[RerankRequest, _body("rerank")]) -> RerankAnswer:
    raise AssertionError(DESCRIBED)


@router.post(
    documents.PATH, tags=["documents"], summary="Add or replace documents", responses=_answers("documents", 409, *BUSY)
)
async def post_documents(request: Annotated[DocumentsRequest, _body("documents")]) -> ChangesAnswer:
    raise AssertionError(DESCRIBED)


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
            _secure(schema)
            schema["paths"][SEARCH_PATH]["get"]["parameters"] = _parameters(models["SearchRequest"]["properties"])
            app.openapi_schema = schema
        return app.openapi_schema

    return openapi


def _secure(schema: dict[str, Any]) -> None:
    """Adds the scope of each route, and what is answered to a request whose key is missing, wrong or too busy."""
    bearer = {"type": "http", "scheme": "bearer", "description": "A key of the service"}
    header = {"type": "apiKey", "in": "header", "name": "api-key", "description": "The same key in another header"}
    schema["components"]["securitySchemes"] = {"bearer": bearer, "api_key": header}
    content = {"application/json": {"schema": {"$ref": SCHEMAS + "ErrorAnswer"}}}
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            scope = scope_of(method.upper(), path)
            if scope is not None:
                route["security"] = [{"bearer": []}, {"api_key": []}]
                route["x-scope"] = scope
                for status in (401, 403, 429):
                    route["responses"][str(status)] = {"description": ERRORS[status], "content": content}


def _bound(models: Mapping[str, Any], settings: Settings) -> None:
    """Adds the bounds that are settings to the schemas."""
    fields = models["SearchRequest"]["properties"]
    fields["top_k"] |= {"minimum": 1, "maximum": settings.max_top_k}
    fields["offset"]["anyOf"][0] |= {"maximum": settings.max_top_k - 1}
    models["RerankOptions"]["properties"]["depth"] |= {"maximum": settings.max_top_k}
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
    parameters: list[dict[str, Any]] = [*EXAMPLES["query_string"]]
    for name, field in fields.items():
        if name not in NOT_IN_QUERY_STRING:
            schema = {key: value for key, value in field.items() if key != "description"}
            if name in ("hyde", "rerank"):
                schema = {"type": "boolean", "default": False}
            parameters.append({"name": name, "in": "query", "description": field["description"], "schema": schema})
    return parameters
