"""HyDE: asks a language model (OpenAI's chat completions) to imagine documents that would answer a query.

If the model is slow, wrong or away, there are no documents and the search is a plain one. Queries are medical: neither
they nor the model's answers are ever logged.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from indexer.store.documents import is_blank
from models.prompts import ask_for_document
from service.limits import Breaker

if TYPE_CHECKING:
    from service.settings import Settings

logger = logging.getLogger(__name__)

TEMPERATURE = 0.7  # above zero, or the documents of one query would all be equal
CONNECTIONS = 16
MAX_ANSWER_BYTES = 256 * 1024


class Hyde:
    """A client of the configured model, with one connection pool for the process."""

    def __init__(self, settings: Settings) -> None:
        """For settings that name an endpoint and a model; connects at the first query."""
        assert settings.hyde_url is not None
        self._timeout_seconds = settings.hyde_timeout_ms / 1000
        self._client = httpx.AsyncClient(
            base_url=settings.hyde_url,
            headers={"Authorization": f"Bearer {settings.hyde_key.get_secret_value()}"} if settings.hyde_key else {},
            timeout=self._timeout_seconds,
            limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS),
        )
        self._body = {"model": settings.hyde_model, "temperature": TEMPERATURE, "max_tokens": settings.hyde_max_tokens}
        self._breaker = Breaker("the language model of HyDE")

    async def imagine(self, query: str, count: int, seconds_left: float) -> list[str]:
        """Returns the documents, at most `count`, that came in time; never raises."""
        if not self._breaker.allows():
            return []
        seconds = min(self._timeout_seconds, seconds_left)
        tasks = [asyncio.create_task(self._ask(query)) for _ in range(count)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        documents = [document for task in tasks if task in done and (document := task.result())]
        if documents:
            self._breaker.succeeded()
        elif len(done) == count or seconds == self._timeout_seconds:  # not the request's own shorter limit
            self._breaker.failed("no document came in time")
        return documents

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, query: str) -> str:
        """Returns one document, empty if the model gave none."""
        body = self._body | {"messages": [{"role": "user", "content": ask_for_document(query)}]}
        try:
            async with self._client.stream("POST", "chat/completions", json=body) as response:
                response.raise_for_status()
                received = b""
                async for chunk in response.aiter_bytes():
                    received += chunk
                    if len(received) > MAX_ANSWER_BYTES:
                        return ""
            return _document_in(orjson.loads(received))
        except Exception as error:  # errors of a foreign server have no common class
            reason = getattr(getattr(error, "response", None), "status_code", type(error).__name__)
            logger.warning("the language model of HyDE gave no document: %s", reason)
            return ""


def _document_in(answer: Any) -> str:  # noqa: ANN401 (any JSON)
    """Returns the text of the first choice, without the model's reasoning before it."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return ""
    document = content.rpartition("</think>")[2].strip() if isinstance(content, str) else ""
    return "" if is_blank(document) else document
