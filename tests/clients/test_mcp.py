"""`care mcp` as agents use it: the official SDK's client, over stdio and streamable HTTP, against the real service."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

import httpx2
import jsonschema
import pytest
from care_client.answers import Collection
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent

import cli
from loadtest.harness.servers import free_port
from tests.api.support import TOKEN
from tests.clients.support import ANSWER, ScriptedReply, ScriptedServer

pytestmark = pytest.mark.anyio
START_SECONDS = 60
# The SDK's client lists the tools after a call, to check the answer's shape.
CALL = [ScriptedReply(body=ANSWER), ScriptedReply(body=asdict(Collection("v1", 0, 0, (), "dense", 9, 9, (), {}, {})))]
READS = ["search", "get_document", "describe_collection"]


def command(url: str, *options: str) -> list[str]:
    return [sys.executable, "cli.py", "mcp", "--url", url, *options]


def over_stdio(url: str, *options: str, key: str = "") -> Client:
    program, *words = command(url, *options)
    return Client(StdioServerParameters(command=program, args=words, env={"CARE_API_KEY": key}))


@contextlib.contextmanager
def http_server(url: str) -> Iterator[str]:
    """Yields the address of an MCP server over HTTP."""
    port = free_port()
    # The server's own key must not be used for HTTP callers.
    environment = os.environ | {"CARE_API_KEY": "own-key"}
    process = subprocess.Popen(command(url, "--http", f"127.0.0.1:{port}"), env=environment)
    try:
        give_up = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, "care mcp ended"
            assert time.monotonic() < give_up
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(START_SECONDS)


@contextlib.asynccontextmanager
async def over_http(address: str, headers: dict[str, str] | None = None) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers=headers, timeout=START_SECONDS) as http,
        Client(streamable_http_client(address, http_client=http)) as client,
    ):
        yield client


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


async def check_tools(client: Client) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert list(tools) == READS
    assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools.values())
    schema = tools["search"].input_schema
    assert schema["properties"]["filters"]["properties"].keys() == {"kind", "year"}
    call: dict[str, Any] = {"query": "怎么急救", "top_k": 5, "mode": "dense"}
    call["filters"] = {"kind": ["first-aid", "drug"], "year": {"gte": 2023, "lt": 2025}}
    jsonschema.validate(call, schema)
    for wrong in ({"kind": ["nonsense"]}, {"year": {"gte": "x"}}, {"colour": ["red"]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(call | {"filters": wrong}, schema)

    found = await client.call_tool("search", call)
    assert not found.is_error
    hits = found.structured_content["hits"]
    assert {hit["id"] for hit in hits} == {"a-1", "a-3"}
    assert all(hit["content"] and hit["title"] and hit["metadata"]["year"] in (2023, 2024) for hit in hits)
    document = (await client.call_tool("get_document", {"id": hits[0]["id"]})).structured_content
    assert hits[0]["content"] in document["text"]
    described = (await client.call_tool("describe_collection")).structured_content
    assert described["documents"] == 8
    assert described["facets"]["kind"]["drug"] == 2


async def test_agents_search_over_stdio(service_url: str) -> None:
    async with over_stdio(service_url) as client:
        await check_tools(client)


async def test_agents_search_over_http(service_url: str) -> None:
    with http_server(service_url) as address:
        async with over_http(address) as client:
            await check_tools(client)


async def test_an_error_tells_the_model_what_is_wrong_with_its_arguments(service_url: str) -> None:
    async with over_stdio(service_url) as client:
        for name, arguments, reason in (
            ("search", {"query": "发热", "filters": {"colour": "red"}}, "colour"),
            ("search", {"query": "发热", "top_k": 0}, "top_k"),
            ("search", {"query": "发热", "topk": 1}, "did you mean top_k"),
            ("search", {"query": "发热", "filters": 5}, "filters: give fields"),
            ("search", {"query": "发热", "filters": "kind"}, "filters: give fields"),
            ("search", {}, "an argument is missing"),
            ("get_document", {"id": "none"}, "not_found"),
            ("delete_document", {"id": "a-1"}, "no such tool"),
        ):
            refused = await client.call_tool(name, arguments)
            assert refused.is_error
            assert reason in text_of(refused)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:-1", "somewhere", "127.0.0.1:"])
def test_an_address_without_a_usable_port_is_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Port 99999 would be taken modulo 65536, so the server would listen on an unexpected port.
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["mcp", "--url", "http://127.0.0.1:1", "--http", address]))
    assert ended.value.code == 1
    assert "is not an address; write it as 127.0.0.1:8001" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:80x", "http://", "ftp://127.0.0.1"])
def test_an_address_of_no_service_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(cli.main(["mcp", "--url", url]))
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert "write it as http://127.0.0.1:8000" in error
    assert error.count("\n") == 1


async def test_tools_that_write_are_offered_only_with_the_option(service_url: str) -> None:
    async with over_stdio(service_url, "--write", key=TOKEN) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == [*READS, "add_documents", "delete_document"]
        notice = {"id": "notice-9", "title": "缬沙坦召回", "text": "部分批次的缬沙坦片自即日起召回。"}
        refused = await client.call_tool("add_documents", {"documents": ["缬沙坦召回"]})
        assert "documents: give a list of objects" in text_of(refused)
        added = await client.call_tool("add_documents", {"documents": [notice]})
        try:
            assert added.structured_content["changed"] == 1
            assert (await client.call_tool("get_document", {"id": "notice-9"})).structured_content[
                "title"
            ] == "缬沙坦召回"
        finally:
            removed = await client.call_tool("delete_document", {"id": "notice-9"})
        assert removed.structured_content["changed"] == 1


async def test_an_unreachable_service_is_named_in_the_error() -> None:
    async with over_stdio("http://127.0.0.1:1") as client:
        with pytest.raises(MCPError, match=r"no answer from http://127\.0\.0\.1:1"):
            await client.list_tools()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_standard_input_is_open(number: signal.Signals) -> None:
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    request = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
    with subprocess.Popen(
        command("http://127.0.0.1:1"), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdin
            assert process.stdout
            print(json.dumps(request), file=process.stdin, flush=True)
            assert "care-search" in process.stdout.readline()
            process.send_signal(number)
            assert process.wait(START_SECONDS) == -number
        finally:
            process.kill()


async def test_over_stdio_the_key_comes_from_the_environment(scripted: ScriptedServer) -> None:
    scripted.replies.extend(CALL)
    async with over_stdio(scripted.url, key="k-1") as client:
        await client.call_tool("search", {"query": "发热"})
    assert {headers.get("authorization") for *_, headers in scripted.requests} == {"Bearer k-1"}


async def test_over_http_only_the_key_of_the_caller_is_used(scripted: ScriptedServer) -> None:
    with http_server(scripted.url) as address:
        for headers in ({"authorization": "Bearer k-2"}, {"api-key": "k-3"}, {}):
            scripted.replies.extend(CALL)
            scripted.requests.clear()
            async with over_http(address, headers) as client:
                await client.call_tool("search", {"query": "发热"})
            assert scripted.requests
            for *_, sent in scripted.requests:
                assert {name: sent[name] for name in ("authorization", "api-key") if name in sent} == headers
