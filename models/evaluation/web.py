"""JSON over HTTP with time-outs and retries, for a running service and for a language model's endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from models.errors import CareError

TIMEOUT_SECONDS = 120.0
ATTEMPTS = 4
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
BUSY = 429


class Endpoint:
    """A base address whose routes speak JSON; safe to call from several threads."""

    def __init__(
        self,
        base: str,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        if not base.startswith(("http://", "https://")):
            raise CareError(f"{base}: not an address; write http://HOST:PORT")
        self.base = base.rstrip("/")
        self._client = httpx.Client(timeout=timeout_seconds, headers=dict(headers or {}))
        self._pause = pause

    def get(self, route: str) -> dict[str, Any]:
        return self._call("GET", route, None)

    def post(self, route: str, body: Mapping[str, object]) -> dict[str, Any]:
        return self._call("POST", route, body)

    def close(self) -> None:
        self._client.close()

    def _call(self, method: str, route: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        """The answer's object; what may pass by itself (no connection, too busy, broken down) is tried again."""
        address, problem = f"{self.base}{route}", ""
        for attempt in range(ATTEMPTS):
            wait = min(FIRST_PAUSE_SECONDS * 4**attempt, LONGEST_PAUSE_SECONDS)
            try:
                response = self._client.request(method, address, json=body)
            except httpx.TransportError as error:
                problem = f"does not answer ({type(error).__name__})"
            else:
                if response.is_success:
                    return _object(address, response)
                problem = f"answers {response.status_code}: {response.text[:200]}"
                if response.status_code != BUSY and not response.is_server_error:
                    break
                wait = min(_retry_after(response) or wait, LONGEST_PAUSE_SECONDS)
            if attempt + 1 < ATTEMPTS:
                self._pause(wait)
        raise CareError(f"{address} {problem}; is it running, and is the address right?")


def _object(address: str, response: httpx.Response) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CareError(f"{address} does not answer with a JSON object; is the address right?")
    return answer


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else None
