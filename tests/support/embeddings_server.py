"""A server with OpenAI's embeddings API on 127.0.0.1, whose answers a test may override."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from tests.support.http_thread import QuietHandler, serving_http

DIM = 16
Answer = tuple[int, Any, dict[str, str]]
"""Status, body and headers."""


def vector_of(text: str, salt: str = "") -> list[float]:
    """Returns a pseudo-random vector that depends only on text and salt."""
    digest = blake2b(f"{salt}{text}".encode(), digest_size=DIM).digest()
    return (np.frombuffer(digest, np.int8).astype(float) + 0.5).tolist()


def answer_to(body: dict[str, Any], salt: str = "") -> dict[str, Any]:
    entries = [{"index": place, "embedding": vector_of(text, salt)} for place, text in enumerate(body["input"])]
    return {"object": "list", "data": entries, "model": body["model"]}


@dataclass
class EmbeddingsServer:
    """`override(body)` may replace the server's answer; None keeps it. `bodies` are all requests."""

    url: str = ""
    salt: str = ""
    override: Callable[[dict[str, Any]], Answer | None] = lambda body: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most_at_once: int = 0
    is_awake: threading.Event = field(default_factory=threading.Event)
    under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def texts(self) -> list[str]:
        """All texts of the requests, in order."""
        return [text for body in self.bodies for text in body["input"]]

    def once(self, *answers: Answer) -> None:
        """Answers the next requests with these, one each."""
        waiting = list(answers)
        self.override = lambda body: waiting.pop(0) if waiting else None

    def answer(self, body: dict[str, Any], key: str | None) -> Answer:
        with self.lock:
            self.bodies.append(body)
            self.keys.append(key)
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
            bent = self.override(body)
        self.is_awake.wait(60)
        with self.lock:
            self.under_way -= 1
        return bent or (200, answer_to(body, self.salt), {})


@contextmanager
def embeddings_server() -> Iterator[EmbeddingsServer]:
    server = EmbeddingsServer()
    server.is_awake.set()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.body())
            status, answer, headers = server.answer(body, self.headers["authorization"])
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.answer(status, content, headers)

    with serving_http(Handler) as port:
        server.url = f"http://127.0.0.1:{port}/v1"
        try:
            yield server
        finally:
            server.is_awake.set()
