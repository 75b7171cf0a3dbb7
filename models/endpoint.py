"""HTTP client for JSON endpoints, with timeouts and retries, and for OpenAI's chat completions."""

from __future__ import annotations

import json
import math
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx

from models.errors import CareError

TIMEOUT_SECONDS = 120.0
ATTEMPTS = 4
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
LONGEST_ANSWER, LARGEST_ANSWER = 4, 1 << 28
"""Timeouts that a whole answer may take, which may come slowly, and its bytes."""
BUSY = 429
REFUSED = (400, 403, 422)
FILTERED = re.compile(r"content.?filter|content.?policy|data_inspection|sensitive|moderation", re.IGNORECASE)
"""How servers name a text that they do not let their model read; other errors of these codes are the caller's."""


class Refused(CareError):
    """A request whose text the server does not accept; it would refuse it again."""


@cache
def trusted() -> ssl.SSLContext:
    """The authorities that clients trust. Every client would read them anew, which takes 45 ms, also for plain HTTP."""
    return httpx.create_ssl_context()


class Rejected(CareError):
    """A request that the server does not understand, or has a field that it does not take."""


class Endpoint:
    """A base address whose routes speak JSON, with timeouts and retries; safe to call from several threads."""

    def __init__(
        self, base: str, headers: Mapping[str, str] | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS,
        pause: Callable[[float], object] = time.sleep, attempts: int = ATTEMPTS,
    ) -> None:  # fmt: skip
        if not base.startswith(("http://", "https://")):
            raise CareError(f"{base}: not an address; write http://HOST:PORT")
        try:
            _ = urlsplit(base).port
        except ValueError as error:
            raise CareError(f"{base}: not an address ({error}); write http://HOST:PORT") from error
        self.base = base.rstrip("/")
        sent = {name: value.strip() for name, value in (headers or {}).items()}
        if not all(value.isascii() and value.isprintable() for value in sent.values()):
            raise CareError(f"{base}: the key has characters that no key has; check the variable that holds it")
        # Some servers repeat the key in their error.
        self._secrets = [value.removeprefix("Bearer ") for value in sent.values()]
        # The callers' threads bound the connections; by itself httpx opens 100, and the other threads time out.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.Client(timeout=timeout_seconds, headers=sent, limits=limits, verify=trusted())
        self._pause, self._attempts, self._timeout_seconds = pause, attempts, timeout_seconds

    def get(self, route: str) -> dict[str, Any]:
        return self._call("GET", route, None)

    def post(self, route: str, body: Mapping[str, object]) -> dict[str, Any]:
        return self._call("POST", route, body)

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, route: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        """Returns the answer's object; retries connection errors, 429 and 5xx. Raises Refused, Rejected, CareError."""
        address, problem = f"{self.base}{route}", ""
        for attempt in range(self._attempts):
            wait = FIRST_PAUSE_SECONDS * 4**attempt
            try:
                response, content = self._request(method, address, body)
            except httpx.RequestError as error:
                problem = f"does not answer ({type(error).__name__})"
            else:
                if response.is_success:
                    with suppress(ValueError, RecursionError):
                        if isinstance(answer := json.loads(content), dict):
                            return answer
                    raise CareError(f"{address} does not answer with a JSON object; is the address right?")
                text = content.decode(errors="replace")
                problem = f"answers {response.status_code}: {self._without_secrets(text)[:200]}"
                if response.status_code in REFUSED and FILTERED.search(text):
                    raise Refused(f"{address} {problem}")
                # llama-cpp-python answers 500 to a form of answers that it does not take.
                if response.status_code in REFUSED or "response_format" in text:
                    raise Rejected(f"{address} {problem}; the server runs, and takes no such request")
                if response.status_code != BUSY and not response.is_server_error:
                    break
                wait = retry_after(response.headers.get("retry-after", "")) or wait
            if attempt + 1 < self._attempts:
                self._pause(min(wait, LONGEST_PAUSE_SECONDS))
        raise CareError(f"{address} {problem}; is it running, and is the address right?")

    def _request(
        self, method: str, address: str, body: Mapping[str, object] | None
    ) -> tuple[httpx.Response, bytearray]:
        """The response and its content. httpx limits the time between two pieces, and not that of all."""
        content, ends = bytearray(), time.monotonic() + LONGEST_ANSWER * self._timeout_seconds
        with self._client.stream(method, address, json=body) as response:
            for piece in response.iter_bytes():
                content += piece
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout("the answer takes too long")
                if len(content) > LARGEST_ANSWER:
                    raise CareError(f"{address} answers with more than {LARGEST_ANSWER:,} bytes; is the address right?")
        return response, content

    def _without_secrets(self, text: str) -> str:
        for secret in filter(None, self._secrets):
            text = text.replace(secret, "[key]")
        return text


@dataclass(frozen=True, slots=True)
class Completion:
    """What a language model wrote, and the tokens that the server counted; 0 if it counts none."""

    text: str
    prompt_tokens: int
    completion_tokens: int


def chat(
    endpoint: Endpoint, model: str, messages: Sequence[Mapping[str, str]], settings: Mapping[str, object]
) -> Completion:
    """Asks for one completion; a model that wrote nothing or refused gives an empty text."""
    answer = endpoint.post("/chat/completions", {"model": model, "messages": list(messages), **settings})
    try:
        text = (answer["choices"][0]["message"].get("content") or "").encode(errors="replace").decode()
    except (LookupError, TypeError, AttributeError) as error:
        raise CareError(f"{endpoint.base}: the answer is not a chat completion") from error
    usage = answer.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    tokens = [counts.get(f"{name}_tokens") for name in ("prompt", "completion")]
    return Completion(text, *(count if isinstance(count, int) and count > 0 else 0 for count in tokens))


def retry_after(text: str) -> float:
    """Returns the seconds of a Retry-After header, which holds seconds or a date; 0 if it has neither."""
    with suppress(ValueError, TypeError, OverflowError):
        seconds = float(text)
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds())
    return 0.0
