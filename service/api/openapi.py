"""The OpenAPI document: FastAPI's own, with the lean routes, which it does not know, added from their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api import documents, search, texts
from service.api.admin import SECURITY_SCHEME
from service.api.common import ERRORS
from service.api.examples import DOCUMENTS, EMBEDDINGS, RERANK, SEARCH, Examples
from service.document_schemas import ChangesAnswer, DocumentsRequest
from service.schemas import ErrorAnswer, Result, SearchAnswer, SearchRequest, StreamEnd
from service.settings import Settings
from service.text_schemas import EmbeddingsAnswer, EmbeddingsRequest, RerankAnswer, RerankRequest

REFERENCE = "#/components/schemas/{model}"
# Parameters of the query string that are not the body's fields under the same name.
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


@dataclass(frozen=True, slots=True)
class _Route:
    """A lean POST route, as /docs shows it."""

    path: str
    tag: str
    summary: str
    request: type[BaseModel]
    answer: type[BaseModel]
    examples: Examples
    errors: Sequence[int] = (408, 413, 422, 429, 503, 504)


ROUTES = (
    _Route(search.PATH, "search", "Search", SearchRequest, SearchAnswer, SEARCH),
    _Route(
        texts.EMBEDDINGS, "texts", "Embeddings, as OpenAI's", EmbeddingsRequest, EmbeddingsAnswer, EMBEDDINGS,
        (404, 408, 413, 422, 429, 503, 504),
    ),
    _Route(
        texts.RERANK, "texts", "Rerank, as Cohere's and Jina's", RerankRequest, RerankAnswer, RERANK,
        (404, 408, 413, 422, 429, 503, 504),
    ),
    _Route(
        documents.PATH, "documents", "Add or replace documents", DocumentsRequest, ChangesAnswer, DOCUMENTS,
        (403, 408, 409, 413, 422, 429, 503, 504),
    ),
)  # fmt: skip


def describe(app: FastAPI, settings: Settings) -> Callable[[], dict[str, Any]]:
    """What `app.openapi` is to be; made once, when /docs is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            models = _models(settings)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(models)
            lean: dict[str, Any] = {route.path: {"post": _post(route)} for route in ROUTES}
            lean[search.PATH] = {"get": _search_from_url(models), **lean[search.PATH]}
            _stream(lean[search.PATH])
            schema["paths"] = lean | schema["paths"]
            app.openapi_schema = schema
        return app.openapi_schema

    return openapi


def _models(settings: Settings) -> dict[str, Any]:
    """The schemas of the models, with the bounds that are settings."""
    answers: list[type[BaseModel]] = [*(route.answer for route in ROUTES), ErrorAnswer, StreamEnd]
    written: list[tuple[type[BaseModel], Any]] = [(route.request, "validation") for route in ROUTES]
    written += [(model, "serialization") for model in answers]
    _, definitions = models_json_schema(written, ref_template=REFERENCE)
    models: dict[str, Any] = definitions["$defs"]
    fields = models["SearchRequest"]["properties"]
    fields["top_k"] |= {"minimum": 1, "maximum": settings.max_top_k}
    fields["offset"]["anyOf"][0] |= {"maximum": settings.max_top_k - 1}
    _bound_texts(fields["query"], settings.max_stream_queries)
    _bound_texts(models["EmbeddingsRequest"]["properties"]["input"], settings.max_texts)
    models["DocumentsRequest"]["properties"]["documents"] |= {"minItems": 1, "maxItems": settings.max_texts}
    models["RerankRequest"]["properties"]["query"] |= {"minLength": 1}
    models["RerankRequest"]["properties"]["documents"] |= {"minItems": 1, "maxItems": settings.max_texts}
    return models


def _bound_texts(field: dict[str, Any], most: int) -> None:
    """A text or a list of them: nothing empty, and not too many."""
    for form in field["anyOf"]:
        if form["type"] == "array":
            form |= {"minItems": 1, "maxItems": most}
            form["items"] |= {"minLength": 1}
        else:
            form |= {"minLength": 1}


def _post(route: _Route) -> dict[str, Any]:
    examples = {name: {"value": value} for name, value in route.examples.requests.items()}
    body = {"application/json": {"schema": _reference(route.request), "examples": examples}}
    return {**_operation(route), "requestBody": {"required": True, "content": body}}


def _search_from_url(models: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [{"name": name, "in": "query"} | facts for name, facts in QUERY_STRING.items()]
    for name, field in models["SearchRequest"]["properties"].items():
        if name not in NOT_IN_QUERY_STRING:
            schema = {key: value for key, value in field.items() if key != "description"}
            if name == "hyde":
                schema = {"type": "boolean", "default": False}
            parameters.append({"name": name, "in": "query", "description": field["description"], "schema": schema})
    return {**_operation(ROUTES[0]), "summary": "Search, from a URL", "parameters": parameters}


def _operation(route: _Route) -> dict[str, Any]:
    answer = {"application/json": {"schema": _reference(route.answer), "example": route.examples.answer}}
    responses: dict[str, Any] = {"200": {"description": "The answer", "content": answer}}
    for status in route.errors:
        content = {"application/json": {"schema": _reference(ErrorAnswer)}}
        responses[str(status)] = {"description": ERRORS[status]["description"], "content": content}
    security: dict[str, Any] = {"security": [{SECURITY_SCHEME: []}]} if 403 in route.errors else {}
    return {"tags": [route.tag], "summary": route.summary, "responses": responses, **security}


def _stream(operations: Mapping[str, dict[str, Any]]) -> None:
    """Searches are answered in lines too, for who accepts them: a result each, then the end or an error."""
    lines = [_reference(model) for model in (Result, StreamEnd, ErrorAnswer)]
    for operation in operations.values():
        content = operation["responses"]["200"]["content"]
        content["application/x-ndjson"] = {"schema": {"anyOf": lines}}


def _reference(model: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
