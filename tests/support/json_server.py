"""A real HTTP server on 127.0.0.1 with JSON answers that a test scripts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_thread import QuietHandler, serving_http

Body = dict[str, Any] | None
Reply = tuple[int, Any]
"""Status and body; a body of bytes is sent as it is."""


@dataclass
class JsonServer:
    """`requests` are (path, body, headers) in order of arrival."""

    url: str
    requests: list[tuple[str, Body, dict[str, str]]] = field(default_factory=list)


@contextmanager
def json_server(reply: Callable[[str, Body], Reply], headers: dict[str, str] | None = None) -> Iterator[JsonServer]:
    """Answers every request with `reply(path, body)` until the block ends."""
    lock = threading.Lock()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.body()))

        def _reply(self, body: Body) -> None:
            with lock:
                server.requests.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
                status, answer = reply(self.path, body)
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.answer(status, content, headers)

    with serving_http(Handler) as port:
        server = JsonServer(f"http://127.0.0.1:{port}")
        yield server
