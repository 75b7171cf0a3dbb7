"""A server with scripted answers, and the asynchronous client behind the methods of the plain one."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from care_client import AsyncCareClient

from tests.support.http_thread import QuietHandler, serving_http

ANSWER = {"results": [{"hits": [], "truncated": False}], "snapshot": "v1", "timings_ms": {"total": 0.1}}


@dataclass(frozen=True)
class ScriptedReply:
    """One reply: a status with a body. With `drop` the connection is closed before the end of the body; with
    `silent` there is no answer until the client leaves."""

    status: int = 200
    body: Any = field(default_factory=lambda: ANSWER)
    headers: Mapping[str, str] = field(default_factory=dict)
    drop: bool = False
    silent: bool = False

    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def refusal(status: int, code: str, *, retry_after: str | None = "0") -> ScriptedReply:
    facts = {"code": code, "message": "said the service", "request_id": "r-1"}
    return ScriptedReply(status, {"error": facts}, {} if retry_after is None else {"Retry-After": retry_after})


DROP = ScriptedReply(drop=True, body=b"")


class ScriptedServer:
    """Answers requests with its scripted replies, one each, and records the requests."""

    url: str

    def __init__(self) -> None:
        self.replies: deque[ScriptedReply] = deque()
        self.requests: list[tuple[str, str, Any, Mapping[str, str]]] = []
        script = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                script._play(self)

            def do_POST(self) -> None:
                script._play(self)

        self._serving = serving_http(Handler)

    def __enter__(self) -> Self:
        self.url = f"http://127.0.0.1:{self._serving.__enter__()}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._serving.__exit__(None, None, None)

    def _play(self, handler: QuietHandler) -> None:
        body = handler.body()
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.requests.append((handler.command, handler.path, json.loads(body or b"null"), headers))
        reply = self.replies.popleft()
        if reply.silent:
            handler.connection.recv(1)
            handler.close_connection = True
            return
        raw = reply.raw()
        if not reply.drop or raw:
            handler.send_response(reply.status)
            for name, value in reply.headers.items():
                handler.send_header(name, value)
            handler.send_header("content-length", str(len(raw) + reply.drop))
            handler.end_headers()
            handler.wfile.write(raw)
        if reply.drop:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)


class Blocking:
    """An asynchronous client whose calls run to their end, with the methods of the plain one."""

    def __init__(self, client: AsyncCareClient, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._client.close())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: object, **options: object) -> object:
            return self._runner.run(method(*arguments, **options))

        return call

    def stream(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 (whatever the client takes)
        results = self._client.stream(*arguments, **options)
        try:
            while True:
                yield self._runner.run(anext(results))  # type: ignore[arg-type]
        except StopAsyncIteration:
            return
        finally:
            self._runner.run(results.aclose())
