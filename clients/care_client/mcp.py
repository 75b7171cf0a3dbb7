"""Give agents the tools search, get_document and describe_collection over a running service (MCP).

Over stdio for a program that starts it, or over streamable HTTP (--http) at /mcp for several. The fields that the
collection can filter by are arguments of the search tool, read from the service whenever tools are listed. Tools only
read, unless --write adds those that post and delete documents. Needs the mcp extra: pip install 'care-search[mcp]'.
"""

from __future__ import annotations

import asyncio
import json
import signal
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import httpx
import uvicorn
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from care_client.answers import Collection, Hit
from care_client.client import AsyncCareClient
from care_client.errors import CareClientError
from care_client.retrieval import content_of, search_options

SERVICE = "http://127.0.0.1:8000"
TOP_K, PASSAGES = 5, 2
MAX_PORT = 65_535
INSTRUCTIONS = (
    "Search the collection, then cite documents by id. get_document has the whole text of a document that was found; "
    "describe_collection says what there is and what filters take."
)
ID = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
DOCUMENTS = {
    "type": "object",
    "properties": {"documents": {"type": "array", "items": {"type": "object", "required": ["id", "text"]}}},
    "required": ["documents"],
}
Json = dict[str, Any]
Context = ServerRequestContext[Any, Any]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--url", type=_url, default=SERVICE, help="address of the service (%(default)s)")
    parser.add_argument("--http", metavar="HOST:PORT", type=_address, help="serve streamable HTTP here, not stdio")
    parser.add_argument("--write", action="store_true", help="add the tools add_documents and delete_document")


def run(arguments: Namespace) -> None:
    server = CareTools(arguments.url, write=arguments.write).server()
    if arguments.http is None:
        # The thread that waits for standard input cannot be interrupted: a signal would wait for the next line.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        asyncio.run(_serve_stdio(server))
    else:
        host, port = arguments.http
        # Stateless: a restart or a second instance behind a proxy loses no client's session.
        app = server.streamable_http_app(host=host, stateless_http=True, json_response=True)
        uvicorn.run(app, host=host, port=port, log_level="warning")


class CareTools:
    """The tools over one service.

    Over stdio the key is CARE_API_KEY. Over HTTP it is what each caller sends: this process never lends its own.
    """

    def __init__(self, url: str, *, write: bool = False) -> None:
        self._url = url
        self._write = write

    def server(self) -> Server[Any]:
        return Server(
            "care-search",
            version=version("care-search"),
            instructions=INSTRUCTIONS,
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
        )

    async def list_tools(self, context: Context, params: PaginatedRequestParams | None) -> ListToolsResult:
        try:
            async with self._client(context) as client:
                collection = await client.collection()
        except CareClientError as error:
            raise MCPError(INTERNAL_ERROR, str(error)) from error
        return ListToolsResult(tools=self._tools(collection))

    async def call_tool(self, context: Context, params: CallToolRequestParams) -> CallToolResult:
        """Calls the service. What it refuses is the tool's answer, so that the model can correct its arguments."""
        try:
            async with self._client(context) as client:
                answer = await self._answer(client, params.name, params.arguments or {})
        except (CareClientError, ValueError) as error:
            return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)
        text = json.dumps(answer, ensure_ascii=False)
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=answer)

    async def _answer(self, client: AsyncCareClient, name: str, given: Mapping[str, Any]) -> Json:
        match name, dict(given):
            case "search", {"query": str(query), **options}:
                answer = await client.search(query, **search_options({"top_k": TOP_K, "passages": PASSAGES}, options))
                return {"hits": [_hit(hit) for hit in answer.hits], "snapshot": answer.snapshot}
            case "get_document", {"id": str(id)}:
                return asdict(await client.document(id))
            case "describe_collection", _:
                return asdict(await client.collection())
            case "add_documents", {"documents": list(documents)} if self._write:
                if not all(isinstance(document, dict) for document in documents):
                    raise ValueError("documents: give a list of objects with id, title, text and metadata")
                return asdict(await client.add_documents(documents))
            case "delete_document", {"id": str(id)} if self._write:
                return asdict(await client.delete_document(id))
        wrong = "no such tool, or an argument is missing or of another type"
        raise ValueError(f"{name}: {wrong}; list the tools to see what there is")

    def _client(self, context: Context) -> AsyncCareClient:
        if context.request is None:
            return AsyncCareClient(self._url)
        return AsyncCareClient(self._url, api_key="", headers=_passed_on(context.request.headers))

    def _tools(self, collection: Collection) -> list[Tool]:
        reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
        found = f"Finds the best of {collection.documents} documents for a query, by meaning and by words."
        tools = [
            Tool(name="search", description=found, input_schema=_search_schema(collection), annotations=reads),
            Tool(name="get_document", description="The whole document.", input_schema=ID, annotations=reads),
            Tool(
                name="describe_collection",
                description="What is served: number of documents, fields for filters, their values and ranges.",
                input_schema={"type": "object", "properties": {}},
                annotations=reads,
            ),
        ]
        if self._write:
            writes = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True)
            adds = "Adds documents (id, title, text, metadata), or replaces those of the same id."
            tools += [
                Tool(name="add_documents", description=adds, input_schema=DOCUMENTS, annotations=writes),
                Tool(name="delete_document", description="Removes it.", input_schema=ID, annotations=writes),
            ]
        return tools


def _hit(hit: Hit) -> Json:
    facts = {"id": hit.id, "score": hit.score, "title": hit.title, "metadata": hit.metadata}
    return facts | {"content": content_of(hit)}


def _search_schema(collection: Collection) -> Json:
    properties = {
        "query": {"type": "string", "description": "A question or keywords, in the documents' language."},
        "top_k": {"type": "integer", "minimum": 1, "maximum": collection.max_top_k, "default": TOP_K},
        "mode": {"enum": list(collection.modes), "default": collection.default_mode},
        "filters": {
            "type": "object",
            "description": "Only documents that satisfy all of these: values to choose from, or a range.",
            "properties": {field: _filter_schema(field, collection) for field in collection.fields},
            "additionalProperties": False,
        },
    }
    return {"type": "object", "properties": properties, "required": ["query"], "additionalProperties": False}


def _filter_schema(field: str, collection: Collection) -> Json:
    value: Json = {"type": "string"}
    if field in collection.facets:
        value = {"enum": list(collection.facets[field])}
    elif field in collection.numbers:
        bounds = collection.numbers[field]
        value = {"type": "number", "description": f"from {bounds['min']} to {bounds['max']}"}
    span = {"type": "object", "properties": dict.fromkeys(("gte", "gt", "lte", "lt"), value)}
    return {"anyOf": [{"type": "array", "items": value}, span | {"additionalProperties": False}]}


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in ("authorization", "api-key") if name in headers}


def _url(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ArgumentTypeError(f"{text!r} is not an address ({error}); write it as {SERVICE}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ArgumentTypeError(f"{text!r} is not an address; write it as {SERVICE}")
    return text


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) <= MAX_PORT):
        raise ArgumentTypeError(f"{text!r} is not an address; write it as 127.0.0.1:8001, with a port up to {MAX_PORT}")
    return host.strip("[]") or "127.0.0.1", int(port)


async def _serve_stdio(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
