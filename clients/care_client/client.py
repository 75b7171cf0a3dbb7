"""The client for plain code: every call blocks until its answer is there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TypeVar, Unpack

import httpx

from care_client import calls
from care_client.answers import Changes, Collection, Document, Embeddings, Health, Ranked, Result, SearchAnswer
from care_client.calls import Call, InputType, NewDocument, SearchOptions, Texts
from care_client.errors import ConnectionFailed
from care_client.exchange import Lines, Reply
from care_client.retry import Attempts, Retry

T = TypeVar("T")
TIMEOUT_SECONDS = 30.0


class CareClient:
    """Asks one service. Safe to share between threads; to be closed, or used as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry: Retry | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`timeout_seconds` bounds the wait for a connection and for each piece of an answer, in every attempt."""
        self._http = httpx.Client(base_url=url, timeout=timeout_seconds, headers=headers)
        self._retry = retry or Retry()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def search(self, query: Texts, **options: Unpack[SearchOptions]) -> SearchAnswer:
        """The best documents for one query, or for each of several."""
        return self._send(calls.search(query, options))

    def stream(self, queries: Sequence[str], **options: Unpack[SearchOptions]) -> Iterator[Result]:
        """One result per query, in order, each as soon as it is there: for more queries than one answer should hold."""
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
        """The whole document with this id; raises NotFound."""
        return self._send(calls.document(id))

    def add_documents(self, documents: Sequence[NewDocument]) -> Changes:
        """Adds documents, or replaces those of the same id: all of them, or none where one is wrong."""
        return self._send(calls.add_documents(documents))

    def delete_document(self, id: str) -> Changes:
        """Takes a document out of all answers; `changed` is 0 where there is none."""
        return self._send(calls.delete_document(id))

    def collection(self) -> Collection:
        """What is served."""
        return self._send(calls.collection())

    def embeddings(self, texts: Texts, *, input_type: InputType = "query", dimensions: int | None = None) -> Embeddings:
        """The unit vectors of texts, in the space of the collection; `dimensions` shortens them."""
        return self._send(calls.embeddings(texts, input_type, dimensions))

    def rerank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> tuple[Ranked, ...]:
        """The given texts by how well they answer the query, best first."""
        return self._send(calls.rerank(query, documents, top_n))

    def health(self) -> Health:
        """Whether the service answers queries now; raises only where there is nobody to say so."""
        return self._send(calls.health())

    def _send(self, call: Call[T]) -> T:
        return call.read(self._attempt(call))

    def _attempt(self, call: Call[T], *, stream: bool = False) -> Reply:
        """Sends until there is a reply to keep. Of a streamed reply, only what is no answer was read."""
        attempts = Attempts(self._retry)
        while True:
            reply: Reply
            try:
                reply = self._http.send(call.request(self._http), stream=stream)
                if stream and reply.status_code not in call.answers:
                    reply.read()
            except httpx.RequestError as error:
                reply = error
            wait = call.pause(reply, attempts)
            if wait is None:
                return reply
            time.sleep(wait)
