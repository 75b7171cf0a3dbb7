"""A panel of language models that grade passages: requests, rate limits, repaired answers, and every answer kept."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.curation.frame import digest
from models.endpoint import Endpoint, Refused, chat
from models.errors import CareError

GRADES = range(5)
ASKED_TIMES = 3
"""How often a model is asked for grades that can be read."""
ATTEMPTS = 8
KEY, BASE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
REMINDER = {
    "zh": "这不是所要求的 JSON。请只输出一个 JSON 对象，包含每个段落编号和 0 到 4 的整数分。",
    "en": "That is not the JSON asked for. Write one JSON object with every passage number and a grade from 0 to 4.",
}
_OBJECT = re.compile(r"\{[^{}]*\}?", re.DOTALL)
_PAIR = re.compile(
    r"[\"']?(?:passage|段落)?[ _-]*(\d+)[\"']?\s*[:：]\s*[\"']?(\d+)[\"']?\s*(?=[,，}\n]|$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Judge:
    """One model, and where it is asked; `key_variable` of the environment holds its key."""

    model: str
    base: str
    key_variable: str = KEY

    @staticmethod
    def parse(text: str) -> Judge:
        """MODEL, MODEL@URL or MODEL@URL#KEY_VARIABLE; without an address, OPENAI_BASE_URL holds it."""
        model, _, address = text.partition("@")
        base, _, variable = address.partition("#")
        base = base or os.environ.get(BASE, "")
        if not model or not base:
            raise CareError(f"--judge {text}: write MODEL@URL, as qwen@http://127.0.0.1:8080/v1, or set {BASE}")
        if variable and variable not in os.environ:
            raise CareError(f"--judge {text}: the environment has no {variable}; set it to the key")
        return Judge(model, base, variable or KEY)

    def open(self, timeout_seconds: float, stopped: threading.Event) -> Endpoint:
        key = os.environ.get(self.key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return Endpoint(self.base, headers, timeout_seconds=timeout_seconds, pause=stopped.wait, attempts=ATTEMPTS)


class Answers:
    """Every answer that a model gave, in a file of JSON lines: what is known is never asked again."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CareError(f"{path}: another process writes it; wait for it or give another --answers") from error
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}
        self._file.seek(0)
        whole = 0
        for line in self._file:
            if not line.endswith(b"\n"):  # its writer was killed
                break
            record = json.loads(line)
            self._known[record["key"]] = record
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
class Verdict:
    """The grades that one model gave to passages, None if it gave none that can be read, and what that took."""

    grades: list[int] | None
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
    """Asks every judge in threads. Equal requests are sent once; `close` ends the threads."""

    def __init__(self, judges: Sequence[Judge], answers: Answers, limits: Limits) -> None:
        self._answers, self._limits, self._stopped = answers, limits, threading.Event()
        self._endpoints = {judge.model: judge.open(limits.timeout_seconds, self._stopped) for judge in judges}
        self._paces = {judge.model: Pace(limits.per_minute, self._stopped) for judge in judges}
        self._pool = ThreadPoolExecutor(limits.at_once, "care-judge")
        self._asked: dict[str, Future[Verdict]] = {}

    def submit(self, prompt: str, language: str, passages: int) -> list[Future[Verdict]]:
        """The verdicts to come of every judge, in their order."""
        futures = []
        for model in self._endpoints:
            key = digest([model, prompt])
            if key not in self._asked:
                self._asked[key] = self._pool.submit(self._judge, model, prompt, language, passages)
            futures.append(self._asked[key])
        return futures

    def forget(self, prompt: str) -> None:
        """Lets go of verdicts that were used; their answers are kept in the file."""
        for model in self._endpoints:
            self._asked.pop(digest([model, prompt]), None)

    def close(self) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._answers.close()

    def _judge(self, model: str, prompt: str, language: str, passages: int) -> Verdict:
        messages, given = [{"role": "user", "content": prompt}], list[dict[str, Any]]()
        while True:
            answer = self._answer(model, messages, len(given))
            given.append(answer)
            grades = read_grades(answer["text"], passages)
            if grades is not None or answer["refused"] or len(given) == ASKED_TIMES:
                break
            said = {"role": "assistant", "content": answer["text"] or "…"}
            messages = [*messages[:1], said, {"role": "user", "content": REMINDER[language]}]
        tokens = (sum(each[name] for each in given) for name in ("prompt_tokens", "completion_tokens"))
        return Verdict(grades, len(given), *tokens)

    def _answer(self, model: str, messages: Sequence[Mapping[str, str]], asked: int) -> dict[str, Any]:
        """The answer to messages; `asked` tells apart two requests of the same messages."""
        settings = {"temperature": 0, "max_tokens": self._limits.max_tokens}
        key = digest([model, settings, messages, asked])
        known = self._answers.get(key)
        if known is not None:
            return known
        self._paces[model].wait()
        if self._stopped.is_set():
            raise CareError("stopped; run the same command again to go on")
        record = {"key": key, "model": model, "text": "", "refused": "", "prompt_tokens": 0, "completion_tokens": 0}
        try:
            given = chat(self._endpoints[model], model, messages, settings)
        except Refused as error:
            record["refused"] = str(error)
        else:
            tokens = {"prompt_tokens": given.prompt_tokens, "completion_tokens": given.completion_tokens}
            record.update(text=given.text, **tokens)
        self._answers.add(record)
        return record


def read_grades(text: str, passages: int) -> list[int] | None:
    """The grades of an answer: its last object with a grade for every passage, and no other; None if there is none.

    Repaired are code fences, text around the object, single quotes, trailing commas, and a missing last brace.
    """
    wanted = {str(number) for number in range(1, passages + 1)}
    for found in reversed(_OBJECT.findall(text)):
        pairs = _PAIR.findall(found)
        grades = dict(pairs)
        values = [int(grade) for grade in grades.values()]
        if grades.keys() == wanted and len(pairs) == passages and all(value in GRADES for value in values):
            return [int(grades[str(number)]) for number in range(1, passages + 1)]
    return None
