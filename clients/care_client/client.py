"""The two clients: `CareClient` blocks, `AsyncCareClient` is awaited."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self, TypeVar, Unpack

import httpx

from care_client import calls
from care_client.answers import Changes, Collection, Document, Embeddings, Health, Ranked, Result, SearchAnswer
from care_client.calls import Attempts, Call, InputType, Lines, NewDocument, Reply, Retry, SearchOptions, Texts
from care_client.errors import ApiError, CareClientError, ConnectionFailed

T = TypeVar("T")
Headers = Mapping[str, str] | None
TIMEOUT_SECONDS = 30.0
KEY_VARIABLE = "CARE_API_KEY"


class CareClient:
    """Asks one service. Safe to share between threads; to be closed, or used as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry: Retry | None = None,
        headers: Headers = None,
    ) -> None:
        """`api_key` None takes CARE_API_KEY of the environment, "" sends none; `headers` may name another.

        `timeout_seconds` bounds the wait for a connection and for each piece of an answer, in every attempt.
        """
        sent = _headers(api_key, headers)
        with _setup_errors():
            self._http = httpx.Client(base_url=url, timeout=timeout_seconds, headers=sent)
        self._retry = retry or Retry()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def search(self, query: Texts, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """Returns the best documents for one query, or for each of several."""
        return self._send(calls.search(query, options))

    def stream(self, queries: Sequence[str], **options: Unpack[SearchOptions]) -> Iterator[Result]:
        """Yields one result per query, in order, each as soon as it is ready: for many queries."""
        call = calls.stream(queries, options)
        lines = Lines()
        response = call.checked(self._attempt(call, stream=True))
        try:
            for line in response.iter_lines():
                if (result := lines.read(line)) is not None:
                    yield result
        except httpx.RequestError as error:
            raise ConnectionFailed(f"the answer broke off: {error}") from error
        finally:
            response.close()
        lines.end()

    def document(self, id: str) -> Document:
        """Returns the whole document with this id; raises NotFound."""
        return self._send(calls.document(id))

    def add_documents(self, documents: Sequence[NewDocument]) -> Changes:
        """Adds documents, or replaces those of the same id: all of them, or none if one is wrong."""
        return self._send(calls.add_documents(documents))

    def delete_document(self, id: str) -> Changes:
        """Removes a document from all answers; `changed` is 0 if there is none."""
        return self._send(calls.delete_document(id))

    def collection(self) -> Collection:
        """Returns what is served."""
        return self._send(calls.collection())

    def embeddings(self, texts: Texts, *, input_type: InputType = "query", dimensions: int | None = None) -> Embeddings:
        """Returns the unit vectors of texts, in the space of the collection; `dimensions` shortens them."""
        return self._send(calls.embeddings(texts, input_type, dimensions))

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> tuple[Ranked, ...]:
        """Orders the given texts by how well they answer the query, best first."""
        return self._send(calls.rerank(query, documents, top_n))

    def health(self) -> Health:
        """Returns whether the service answers queries now; raises only if neither it nor a proxy answers."""
        try:
            return self._send(calls.health())
        except ApiError as error:
            return Health(False, None, error.message)

    def _send(self, call: Call[T]) -> T:
        return call.read(self._attempt(call))

    def _attempt(self, call: Call[T], *, stream: bool = False) -> Reply:
        """Sends until a reply needs no retry. Of a streamed reply the body is read only if it is an error."""
        attempts = Attempts(self._retry)
        while True:
            reply: Reply
            try:
                reply = self._http.send(call.request(self._http), stream=stream)
                if stream and reply.status_code != httpx.codes.OK:
                    reply.read()
            except httpx.RequestError as error:
                reply = error
            wait = call.pause(reply, attempts)
            if wait is None:
                return reply
            time.sleep(wait)


class AsyncCareClient:
    """The client for the tasks of one event loop; its methods are those of `CareClient`, to be awaited."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry: Retry | None = None,
        headers: Headers = None,
    ) -> None:
        sent = _headers(api_key, headers)
        with _setup_errors():
            self._http = httpx.AsyncClient(base_url=url, timeout=timeout_seconds, headers=sent)
        self._retry = retry or Retry()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def search(self, query: Texts, **options: Unpack[SearchOptions]) -> SearchAnswer:
        return await self._send(calls.search(query, options))

    async def stream(self, queries: Sequence[str], **options: Unpack[SearchOptions]) -> AsyncGenerator[Result, None]:
        """Close the generator (`contextlib.aclosing`) to stop before the end."""
        call = calls.stream(queries, options)
        lines = Lines()
        response = call.checked(await self._attempt(call, stream=True))
        try:
            async for line in response.aiter_lines():
                if (result := lines.read(line)) is not None:
                    yield result
        except httpx.RequestError as error:
            raise ConnectionFailed(f"the answer broke off: {error}") from error
        finally:
            await response.aclose()
        lines.end()

    async def document(self, id: str) -> Document:
        return await self._send(calls.document(id))

    async def add_documents(self, documents: Sequence[NewDocument]) -> Changes:
        return await self._send(calls.add_documents(documents))

    async def delete_document(self, id: str) -> Changes:
        return await self._send(calls.delete_document(id))

    async def collection(self) -> Collection:
        return await self._send(calls.collection())

    async def embeddings(
        self, texts: Texts, *, input_type: InputType = "query", dimensions: int | None = None
    ) -> Embeddings:
        return await self._send(calls.embeddings(texts, input_type, dimensions))

    async def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> tuple[Ranked, ...]:
        return await self._send(calls.rerank(query, documents, top_n))

    async def health(self) -> Health:
        try:
            return await self._send(calls.health())
        except ApiError as error:
            return Health(False, None, error.message)

    async def _send(self, call: Call[T]) -> T:
        return call.read(await self._attempt(call))

    async def _attempt(self, call: Call[T], *, stream: bool = False) -> Reply:
        attempts = Attempts(self._retry)
        while True:
            reply: Reply
            try:
                reply = await self._http.send(call.request(self._http), stream=stream)
                if stream and reply.status_code != httpx.codes.OK:
                    await reply.aread()
            except httpx.RequestError as error:
                reply = error
            wait = call.pause(reply, attempts)
            if wait is None:
                return reply
            await asyncio.sleep(wait)


def _headers(api_key: str | None, headers: Headers) -> httpx.Headers:
    """Returns the key as a header, unless the given headers have an authorization of their own.

    The line break at the end of a file of keys is removed: httpx would refuse it with an error that shows the key.
    """
    try:
        given = {name: value.strip() for name, value in httpx.Headers(headers).items()}
    except (TypeError, ValueError):
        raise CareClientError("headers: names and values must be texts of visible ASCII characters") from None
    key = (os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key).strip()
    for name, value in ({"the API key": key} | {f"header {name!r}": value for name, value in given.items()}).items():
        if not (value.isascii() and value.isprintable()):  # httpx's error would show it
            raise CareClientError(f"{name} holds a character that is not visible ASCII; copy it again, on one line")
    return httpx.Headers(({"authorization": f"Bearer {key}"} if key else {}) | given)


@contextmanager
def _setup_errors() -> Iterator[None]:
    try:
        yield
    except (httpx.InvalidURL, ValueError, ImportError, OSError) as error:
        raise CareClientError(
            f"{error}; check the service's address, and the proxies and certificates of the environment (HTTP_PROXY, "
            "HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE)"
        ) from error
