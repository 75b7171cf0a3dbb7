"""The OpenAPI document: FastAPI's own for its routes, and /v1/search, which it does not know, added from the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from service.api import search
from service.api.common import ERRORS
from service.schemas import ErrorAnswer, SearchAnswer, SearchRequest

REFERENCE = "#/components/schemas/{model}"
EXAMPLE_ANSWER = {
    "results": [
        {
            "hits": [
                {
                    "score": 0.931207,
                    "id": "drug-001",
                    "title": "氨氯地平",
                    "metadata": {"kind": "drug", "department": "心血管内科", "updated": "2025-06-01"},
                    "snippet": "用于治疗高血压和心绞痛……",
                    "highlights": [[4, 7]],
                }
            ],
            "truncated": False,
        }
    ],
    "snapshot": "20261115T041500123Z-1a2b3c4d",
    "timings_ms": {"tokenize": 0.05, "queue": 0.12, "encode": 1.9, "search": 0.4, "fetch": 0.1, "total": 2.6},
}
EXAMPLES = {
    "one query": {"query": "高血压吃什么药", "top_k": 5},
    "several queries": {"query": ["发烧怎么办", "chest pain first aid"], "mode": "dense", "fields": ["title", "text"]},
    "filters": {
        "query": "感冒",
        "filters": [
            {"field": "kind", "eq": "drug"},
            {"field": "department", "in": ["呼吸内科", "全科"]},
            {"field": "updated", "gte": "2025-01-01", "lt": "2026-01-01"},
        ],
    },
}
# Parameters of the query string that are not the body's fields under the same name.
QUERY_STRING: dict[str, dict[str, Any]] = {
    "q": {
        "description": "A query; repeat it for several.",
        "required": True,
        "schema": {"type": "string"},
        "example": "高血压吃什么药",
    },
    "fields": {
        "description": "What a hit shows beside id and score, separated by commas.",
        "schema": {"type": "string", "default": "title,snippet,metadata"},
    },
    "filter": {
        "description": "field:operator:value with eq, in (values separated by commas), gte, gt, lte or lt; may repeat.",
        "schema": {"type": "array", "items": {"type": "string"}},
        "example": ["kind:eq:drug"],
    },
}
SAME_AS_BODY = ("top_k", "mode", "fusion", "weight")


def describe(app: FastAPI, max_top_k: int) -> Callable[[], dict[str, Any]]:
    """What `app.openapi` is to be; made once, when /docs is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _add_search(schema, max_top_k)
            app.openapi_schema = schema
        return app.openapi_schema

    return openapi


def _add_search(schema: dict[str, Any], max_top_k: int) -> None:
    _, definitions = models_json_schema(
        [(SearchRequest, "validation"), (SearchAnswer, "serialization"), (ErrorAnswer, "serialization")],
        ref_template=REFERENCE,
    )
    body_fields = definitions["$defs"]["SearchRequest"]["properties"]
    body_fields["top_k"] |= {"minimum": 1, "maximum": max_top_k}
    schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    examples = {name: {"value": value} for name, value in EXAMPLES.items()}
    request = {"application/json": {"schema": _reference(SearchRequest), "examples": examples}}
    get, post = _operation("Search, from a URL"), _operation("Search")
    get["parameters"] = [{"name": name, "in": "query"} | facts for name, facts in QUERY_STRING.items()]
    for name in SAME_AS_BODY:
        field = dict(body_fields[name])
        parameter = {"name": name, "in": "query", "description": field.pop("description"), "schema": field}
        get["parameters"].append(parameter)
    post["requestBody"] = {"required": True, "content": request}
    schema["paths"] = {search.PATH: {"get": get, "post": post}} | schema["paths"]


def _operation(summary: str) -> dict[str, Any]:
    answer = {"application/json": {"schema": _reference(SearchAnswer), "example": EXAMPLE_ANSWER}}
    responses: dict[str, Any] = {"200": {"description": "One result per query, in the order asked", "content": answer}}
    for status in (413, 422, 429, 503):
        content = {"application/json": {"schema": _reference(ErrorAnswer)}}
        responses[str(status)] = {"description": ERRORS[status]["description"], "content": content}
    return {"tags": ["search"], "summary": summary, "responses": responses}


def _reference(model: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=model.__name__)}
