"""Asks language models: requests in threads, rate limits, retries of unusable answers, every answer kept."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from models.curation.frame import digest, hold
from models.endpoint import Completion, Endpoint, Refused, Rejected, chat
from models.errors import CareError

ASKED_TIMES = 3
"""How often a model is asked for an answer that can be read."""
ATTEMPTS = 8
KEY, BASE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
Form = Callable[[Mapping[str, Any]], dict[str, Any]]
FORMS: Sequence[Form] = (
    lambda schema: {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}},
    lambda schema: {"type": "json_object", "schema": schema},
)
"""How a request states the form of its answer: for OpenAI and vLLM, and for llama-cpp-python."""
NOTHING = "no usable answer"
RECORD = {"text": str, "refused": str, "prompt_tokens": int, "completion_tokens": int}
"""What is kept of an answer, beside its key and the model's name."""


@dataclass(frozen=True, slots=True)
class Model:
    """One language model, and where it is asked; `key_variable` of the environment holds its key."""

    name: str
    base: str
    key_variable: str = KEY
    price: tuple[float, float] | None = None
    """Of a million tokens: of prompts, of answers."""

    @staticmethod
    def parse(text: str) -> Model:
        """MODEL, MODEL@URL or MODEL@URL#KEY_VARIABLE; without an address, OPENAI_BASE_URL holds it."""
        name, found, address = text.rpartition("@http")  # the name may hold an @
        name, base = (name, f"http{address}") if found else (text, os.environ.get(BASE, ""))
        base, _, variable = base.partition("#")
        try:
            user = urlsplit(base).username
        except ValueError:
            base, user, text = "", None, name
        if not name or not base:
            raise CareError(f"{text}: write MODEL@URL, as qwen@http://127.0.0.1:8080/v1, or set {BASE}")
        if user is not None or (variable and not variable.isidentifier()):
            raise CareError(
                f"{name}: write no key; set a variable to it, and put the variable's name behind the address"
            )
        if variable and variable not in os.environ:
            raise CareError(f"{text}: the environment has no {variable}; set it to the key")
        return Model(name, base, variable or KEY)

    def open(self, timeout_seconds: float, pause: Callable[[float], object]) -> Endpoint:
        key = os.environ.get(self.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return Endpoint(self.base, headers, timeout_seconds=timeout_seconds, pause=pause, attempts=ATTEMPTS)


class Answers:
    """Every answer that a model gave, in a file of JSON lines: what is known is never asked again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        hold(self._file, path, "--answers")
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):  # its writer was killed
                break
            try:
                record = json.loads(line)
                self._known[record["key"]] = {name: kind(record[name]) for name, kind in RECORD.items()}
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                self._file.close()
                raise CareError(
                    f"{path}:{number}: not an answer of a model; remove this line if the others are, or give another"
                    " --answers"
                ) from error
            whole += len(line)
        self._file.truncate(whole)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._known.get(key)

    def add(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")
            self._file.flush()
            self._known[record["key"]] = record

    def close(self) -> None:
        self._file.close()


class Pace:
    """Limit of requests a minute, evenly spaced; 0: no limit."""

    def __init__(self, per_minute: float, stopped: threading.Event) -> None:
        self._interval = 60 / per_minute if per_minute else 0.0
        self._next, self._lock, self._stopped = 0.0, threading.Lock(), stopped

    def wait(self) -> None:
        with self._lock:
            begin = max(time.monotonic(), self._next)
            self._next = begin + self._interval
        self._stopped.wait(max(0.0, begin - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how its answer is read: `read` gives None for an answer that it cannot use."""

    prompt: str
    read: Callable[[str], Any]
    reminder: str
    """The message that follows an unusable answer."""
    temperature: float = 0.0
    seed: int = 0
    """Tells apart two answers to one prompt."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of the answer, for servers that can hold a model to it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What was read of a model's answer, None if it gave nothing of use, and what that took."""

    value: Any
    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How models are asked."""

    at_once: int = 8
    per_minute: float = 0.0
    timeout_seconds: float = 120.0
    max_tokens: int = 1024


class Panel:
    """Asks every model in threads. Equal requests are sent once; `close` ends the threads."""

    def __init__(self, models: Sequence[Model], answers: Path, limits: Limits) -> None:
        self._limits, self._stopped = limits, threading.Event()
        self._paces = {model.name: Pace(limits.per_minute, self._stopped) for model in models}
        self._lock = threading.Lock()
        self._slow = set[str]()  # models whose last request was tried again, which was reported
        self._endpoints = {
            model.name: model.open(limits.timeout_seconds, partial(self._wait, model.name)) for model in models
        }
        self._pool = ThreadPoolExecutor(limits.at_once, "care-panel")
        self._asked: dict[str, Future[Reply]] = {}
        self._forms: dict[str, Sequence[Form]] = {}
        self._answers = Answers(answers)

    def submit(self, request: Request) -> list[Future[Reply]]:
        """The replies to come of every model, in their order."""
        futures = []
        for model in self._endpoints:
            key = self._key(model, request)
            if key not in self._asked:
                self._asked[key] = self._pool.submit(self._reply, model, request)
            futures.append(self._asked[key])
        return futures

    def forget(self, request: Request) -> None:
        """Lets go of replies that were used; the answers are kept in the file."""
        for model in self._endpoints:
            self._asked.pop(self._key(model, request), None)

    @staticmethod
    def _key(model: str, request: Request) -> str:
        return digest([model, request.prompt, request.temperature, request.seed])

    def close(self) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._answers.close()

    def _reply(self, model: str, request: Request) -> Reply:
        messages, answers = [{"role": "user", "content": request.prompt}], list[dict[str, Any]]()
        while True:
            answer = self._answer(model, request, messages, len(answers))
            answers.append(answer)
            value = None if answer["refused"] else request.read(answer["text"])
            if value is not None or answer["refused"] or len(answers) == ASKED_TIMES:
                break
            previous = {"role": "assistant", "content": answer["text"] or "…"}
            messages = [*messages[:1], previous, {"role": "user", "content": request.reminder}]
        tokens = (sum(each[name] for each in answers) for name in ("prompt_tokens", "completion_tokens"))
        return Reply(value, len(answers), *tokens)

    def _answer(
        self, model: str, request: Request, messages: Sequence[Mapping[str, str]], asked: int
    ) -> dict[str, Any]:
        """The answer to messages; `asked` tells apart two requests of the same messages."""
        settings = {"temperature": request.temperature, "max_tokens": self._limits.max_tokens, "seed": request.seed}
        key = digest([model, settings, messages, asked])
        known = self._answers.get(key)
        if known is not None:
            return known
        self._wait(model, 0)
        record = {"key": key, "model": model, "text": "", "refused": "", "prompt_tokens": 0, "completion_tokens": 0}
        try:
            completion = self._chat(model, request.schema, messages, settings)
        except Refused as error:
            record["refused"] = str(error)
        else:
            tokens = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
            record.update(text=completion.text, **tokens)
        self._answers.add(record)
        with self._lock:
            self._slow.discard(model)
        return record

    def _wait(self, model: str, seconds: float) -> None:
        """Waits before a request, also before another try of it: the server counts both."""
        with self._lock:
            reported = model in self._slow
            if seconds:
                self._slow.add(model)
        if seconds and not reported:
            tqdm.write(f"{model} does not answer or is busy; asking again …", file=sys.stderr)
        self._stopped.wait(seconds)
        self._paces[model].wait()
        if self._stopped.is_set():
            raise CareError("stopped; run the same command again to go on")

    def _chat(
        self, model: str, schema: Mapping[str, Any] | None, messages: Sequence[Mapping[str, str]],
        settings: Mapping[str, Any],
    ) -> Completion:  # fmt: skip
        """Tells the server the answer's schema in the first form that it takes; asks without one if it takes none."""
        endpoint, forms = self._endpoints[model], self._forms.get(model, FORMS) if schema else ()
        for place, form in enumerate(forms):
            with suppress(Rejected):
                completion = chat(endpoint, model, messages, {**settings, "response_format": form(schema or {})})
                self._forms[model] = forms[place : place + 1]
                return completion
        completion = chat(endpoint, model, messages, settings)
        if schema:
            self._forms[model] = ()
        return completion
