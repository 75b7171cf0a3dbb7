"""A server on 127.0.0.1 whose models grade passages by the digit that ends them, or say what a test tells them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.http_thread import QuietHandler, serving_http

PASSAGE = re.compile(r"^段落 (\d+)：.*?(\d)$", re.MULTILINE)
USAGE = {"prompt_tokens": 100, "completion_tokens": 7}


@dataclass(frozen=True)
class Reply:
    """How a request is answered in place of the right grades."""

    status: int = 200
    text: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0


Fault = Callable[[str, str, int], Reply | None]
"""(model, prompt, how often this model was asked it) → a failure, or None for the right answer."""


@dataclass
class GradingServer:
    """Counts what was asked and what was answered rightly, by (model, prompt)."""

    url: str = ""
    fault: Fault = lambda model, prompt, number: None
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    graded: Counter[tuple[str, str]] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)
    """Of all requests, in their order."""
    say: Callable[[str, str, int], str] | None = None
    """(model, prompt, how often it was asked) → the answer, in place of grades."""
    paid: int = 0
    """Completions of any kind that were sent in full."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def grade(self, model: str, digit: int) -> int:
        """Model `a` gives the digit, `b` too but 2 for 3."""
        return 2 if model == "b" and digit == 3 else digit

    def reply(self, body: dict[str, Any]) -> Reply:
        model, prompt = body["model"], body["messages"][0]["content"]
        with self.lock:
            self.asked[model, prompt] += 1
            number = self.asked[model, prompt]
            self.seeds.append(body["seed"])
        failure = self.fault(model, prompt, number)
        if failure is not None:
            return failure
        with self.lock:
            self.graded[model, prompt] += 1
        if self.say is not None:
            return Reply(text=self.say(model, prompt, number))
        grades = {number: self.grade(model, int(digit)) for number, digit in PASSAGE.findall(prompt)}
        return Reply(text=json.dumps(grades))


@contextmanager
def grading_server() -> Iterator[GradingServer]:
    server = GradingServer()

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            reply = server.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            time.sleep(reply.delay_seconds)
            choice = {"message": {"role": "assistant", "content": reply.text}}
            good = reply.status == 200
            content = json.dumps({"choices": [choice], "usage": USAGE} if good else {"error": reply.text}).encode()
            with suppress(OSError):  # the client may have given up or been killed
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                with server.lock:
                    server.paid += good and not reply.delay_seconds

    with serving_http(Handler) as port:
        server.url = f"http://127.0.0.1:{port}/v1"
        yield server
