"""A server with OpenAI's chat completions on a real socket, whose answers a test sets."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.http_thread import QuietHandler, serving_http

Respond = Callable[[int], tuple[int, bytes]]


def choice(text: object) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


class LanguageModel:
    """Records requests; `respond(number of the request)` gives the status and body of the answer."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.respond: Respond = lambda number: (200, choice("氨氯地平每日一次，用于治疗高血压。"))
        self.url = ""
        # Cleared by a test that needs a slow model; set again at the end, so that no thread is left.
        self.awake = threading.Event()
        self.awake.set()
        self._lock = threading.Lock()

    def answer(self, path: str, authorization: str | None, body: dict[str, Any]) -> tuple[int, bytes]:
        with self._lock:
            number = len(self.requests)
            self.requests.append({"path": path, "authorization": authorization, **body})
        assert self.awake.wait(60)
        return self.respond(number)


@contextlib.contextmanager
def language_model() -> Iterator[LanguageModel]:
    model = LanguageModel()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.answer(*model.answer(self.path, self.headers["Authorization"], json.loads(self.body())))

    with serving_http(Handler) as port:
        model.url = f"http://127.0.0.1:{port}/v1"
        try:
            yield model
        finally:
            model.awake.set()
