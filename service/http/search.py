"""GET and POST /v1/search in plain ASGI: parses the request, calls the searcher, sends its answer."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from models.errors import did_you_mean
from service.errors import SHOWN_NAME, InvalidRequest, invalid_request
from service.http.asgi import KEY, WhileConnected, parse_body, read_body, send_bytes, send_lines, wants_lines
from service.http.middleware import QUERIES, REQUEST_ID, SEARCH, TIMINGS
from service.search.request import SearchRequest, require_few_clauses

if TYPE_CHECKING:
    from service.runtime import Runtime

PATH = "/v1/search"
METHODS = ["GET", "POST"]
FROM_QUERY_STRING = {"q": "query", "filter": "filters"}  # parameter → field of the body
PARAMETERS = [
    *FROM_QUERY_STRING,
    *(name for name in SearchRequest.model_fields if name not in FROM_QUERY_STRING.values()),
]
LISTS = ("query", "fields", "filters", "facets")  # parameters that may repeat
OPERATORS = ("eq", "in", "gte", "gt", "lte", "lt")
NEGATION = "not."
MAX_PARAMETERS = 1000


class SearchRoute:
    """The ASGI endpoint of a search."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime: Runtime = scope["app"].state.runtime
        settings = runtime.settings
        body = await read_body(scope, receive, settings.max_body_bytes)
        if scope["method"] == "POST":
            require_few_clauses(body)
            request = parse_body(SearchRequest, body)
        else:
            request = parse_query_string(scope["query_string"])
        if settings.log_queries:
            scope[QUERIES] = request.queries
        scope[SEARCH] = request
        serving = runtime.servings.current()
        if wants_lines(scope):
            stream = runtime.searcher.stream(serving, request, scope[KEY])
            with WhileConnected(receive):
                async with aclosing(stream) as lines:
                    await send_lines(send, lines, scope[REQUEST_ID])
            return
        with WhileConnected(receive):
            body, timings = await runtime.searcher.search(serving, request, scope[KEY])
        scope[TIMINGS] = timings
        await send_bytes(send, body, headers=[(b"server-timing", timings.as_server_timing())])


def parse_query_string(raw: bytes) -> SearchRequest:
    """Parses `q=…&top_k=…&mode=…&fields=title,text&filter=kind:eq:drug&filter=updated:gte:2025-01-01`."""
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except UnicodeDecodeError:
        raise InvalidRequest("query", "the query string is not UTF-8") from None
    except ValueError:
        raise InvalidRequest("query", f"the query string has more than {MAX_PARAMETERS} parameters") from None
    fields: dict[str, Any] = {}
    for name, value in pairs:
        field = FROM_QUERY_STRING.get(name, name)
        if name not in PARAMETERS:
            there_are = f"; there are {', '.join(PARAMETERS)}"
            raise InvalidRequest(name[:SHOWN_NAME], f"no such parameter{did_you_mean(name, PARAMETERS) or there_are}")
        if field in LISTS:
            single = [_parse_filter(value)] if field == "filters" else [value]
            many = value.split(",") if value else []  # an empty parameter asks for none
            fields.setdefault(field, []).extend(many if field in ("fields", "facets") else single)
        elif field in fields:
            raise InvalidRequest(field, "given more than once")
        else:
            fields[field] = value
    if not (queries := fields.get("query", [])):
        raise InvalidRequest("query", "give a text as q=…")
    try:
        return SearchRequest.model_validate(fields | ({"query": queries[0]} if len(queries) == 1 else {}))
    except ValidationError as error:
        raise invalid_request(error, SearchRequest) from None


def _parse_filter(text: str) -> dict[str, Any]:
    """Parses `field:operator:value` or `field:not.operator:value`; commas separate the values of `in`."""
    name, _, rest = text.partition(":")
    negated = rest.startswith(NEGATION)
    operator, colon, value = rest.removeprefix(NEGATION).partition(":")
    if operator not in OPERATORS or not colon:
        form = f"field:operator:value with an operator of {', '.join(OPERATORS)}"
        raise InvalidRequest("filters", f"must read {form}; for example filter=kind:eq:drug")
    clause = {"field": name, operator: value.split(",") if operator == "in" else value}
    return {"not": clause} if negated else clause
