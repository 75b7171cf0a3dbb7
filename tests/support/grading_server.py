"""A server on 127.0.0.1 whose models grade passages by their last digit, or answer as a test sets."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.http_thread import QuietHandler, serving_http

PASSAGE = re.compile(r"^段落 (\d+)：.*?(\d)$", re.MULTILINE)
USAGE = {"prompt_tokens": 100, "completion_tokens": 7}


@dataclass(frozen=True)
class Reply:
    """One answer; `text` None stands for the right grades."""

    status: int = 200
    text: str | None = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    silent: bool = False
    """Send nothing until the client gives up."""
    pause_seconds: float = 0.0
    """Between the quarters of the body: a slow stream."""
    cut: bool = False
    """Close the connection in the middle of the body."""


Fault = Callable[[str, str, int], Reply | None]
"""(model, prompt, how often this model was asked it) → a failure, or None for the right answer."""


@dataclass
class GradingServer:
    """Counts requests and right answers by (model, prompt)."""

    url: str = ""
    fault: Fault = lambda model, prompt, number: None
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    graded: Counter[tuple[str, str]] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)
    """Of all requests, in their order."""
    respond: Callable[[str, str, int], str] | None = None
    """(model, prompt, how often it was asked) → the answer, in place of grades."""
    takes: Sequence[str] = ("json_schema", "json_object")
    """The types of `response_format` that it accepts."""
    rejects: int = 422
    """The status of the others."""
    formats: list[str] = field(default_factory=list)
    """The types that came, in their order; empty where a request had none."""
    schemas: list[dict[str, Any]] = field(default_factory=list)
    paid: int = 0
    """Completions of any kind that were sent, but for those that come too late or are cut."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def grade(self, model: str, digit: int) -> int:
        """Returns the grade of a model: `a` gives the digit, `b` too, but 2 for 3."""
        return 2 if model == "b" and digit == 3 else digit

    def reply(self, body: dict[str, Any]) -> Reply:
        model, prompt = body["model"], body["messages"][0]["content"]
        form = body.get("response_format", {})
        with self.lock:
            self.formats.append(form.get("type", ""))
            if form and form["type"] not in self.takes:
                return Reply(self.rejects, "response_format: not a known type")
            self.schemas += [form.get("json_schema", form)["schema"]] if form else []
            self.asked[model, prompt] += 1
            number = self.asked[model, prompt]
            self.seeds.append(body["seed"])
        failure = self.fault(model, prompt, number)
        if failure is not None and failure.text is not None:
            return failure
        with self.lock:
            self.graded[model, prompt] += 1
        if self.respond is not None:
            return Reply(text=self.respond(model, prompt, number))
        grades = {number: self.grade(model, int(digit)) for number, digit in PASSAGE.findall(prompt)}
        return replace(failure or Reply(), text=json.dumps(grades))


def failing(model: str, prompt: str, number: int) -> Reply | None:
    """Makes every prompt fail once or more, each in another way, before it is answered, some slowly."""
    failures = [
        [Reply(500, "broken")] * 2,
        [Reply(429, "slow down", {"Retry-After": "1"})],
        [Reply(200, "抱歉，我无法回答"), Reply(200, '{"1": 4, "2": ')],
        [Reply(200, "", silent=True)],
        [Reply(503, ""), Reply(200, '{"1": 9, "2": 9, "3": 9}')],
        [Reply(200, None, pause_seconds=0.6)],
        [Reply(200, "", cut=True), Reply(429, "slow down")],
    ]
    mine = failures[(sum(map(ord, prompt)) + ord(model)) % len(failures)]
    return mine[number - 1] if number <= len(mine) else None


@contextmanager
def grading_server() -> Iterator[GradingServer]:
    server = GradingServer()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            reply = server.reply(json.loads(self.body()))
            choice = {"message": {"role": "assistant", "content": reply.text}}
            good = reply.status == 200
            content = json.dumps({"choices": [choice], "usage": USAGE} if good else {"error": reply.text}).encode()
            with suppress(OSError):  # the client may have given up or been killed
                if reply.silent:
                    self.connection.recv(1)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                with server.lock:  # before the last byte, after which a test may read the counts
                    server.paid += good and not reply.silent and not reply.cut
                quarter = -(-len(content) // 4)
                for first in range(0, len(content) // 2 if reply.cut else len(content), quarter):
                    time.sleep(reply.pause_seconds)
                    self.wfile.write(content[first : first + quarter])
                self.close_connection = self.close_connection or reply.cut

    with serving_http(Handler) as port:
        server.url = f"http://127.0.0.1:{port}/v1"
        yield server
