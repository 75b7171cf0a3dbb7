"""A server with OpenAI's chat completions on a real socket, whose answers a test sets."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = model.answer(self.path, self.headers["Authorization"], body)
            with contextlib.suppress(OSError):  # the service may have given up
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    model.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield model
    finally:
        model.awake.set()
        server.shutdown()
        thread.join()
        server.server_close()
