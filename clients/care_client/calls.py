"""Builds requests, parses responses and decides when to retry; shared by both clients."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from typing import Any, Generic, Literal, TypedDict, TypeVar
from urllib.parse import quote

import httpx

from care_client.answers import Changes, Collection, Document, Embeddings, Health, Json, Ranked, Result, SearchAnswer
from care_client.errors import KINDS, ApiError, BadAnswer, CareClientError, ConnectionFailed

T = TypeVar("T")
Texts = str | Sequence[str]
InputType = Literal["query", "document"]
Reply = httpx.Response | httpx.RequestError
"""The result of an attempt: a response whose body is loaded, or the reason why there is none."""

NDJSON = "application/x-ndjson"
RETRIED = frozenset({429, 503})
# Errors of a connection: the same call may succeed the next time. A read timeout is not among them, because asking
# again would add to the work of a service that is slow already.
BROKEN = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
SHOWN_PATH = 80
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class SearchOptions(TypedDict, total=False):
    """The parameters of a search; the service has a default for each."""

    top_k: int
    offset: int
    facets: Sequence[str]
    mode: Literal["dense", "lexical", "hybrid"]
    fields: Sequence[Literal["title", "snippet", "metadata", "text", "headline"]]
    filters: Sequence[Mapping[str, Any]]
    fusion: Literal["scores", "reciprocal"]
    weight: float
    min_score: float
    passages: int
    explain: bool
    hyde: bool | Mapping[str, int]
    rerank: bool | Mapping[str, int]
    timeout_ms: int
    bulk: bool
    cache: bool


class NewDocument(TypedDict, total=False):
    """A document to add: an id, named `id` or `_id`, and a text or a title."""

    id: str
    _id: str
    title: str
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long to retry. Every call may be repeated: all are idempotent.

    The wait before attempt n is drawn between half and all of `first_seconds` · 2ⁿ, never above `longest_seconds`, and
    never below what the service asks for. A call gives up rather than wait for more than `total_seconds` in all.
    """

    attempts: int = 4
    first_seconds: float = 0.1
    longest_seconds: float = 5.0
    total_seconds: float = 15.0


@dataclass(slots=True)
class Attempts:
    """The attempts of one call so far."""

    retry: Retry
    made: int = field(default=0, init=False)
    waited_seconds: float = field(default=0.0, init=False)

    def next_wait(self, asked_seconds: float = 0.0) -> float | None:
        """Seconds until the next attempt after one that failed; None when that was the last."""
        self.made += 1
        if self.made >= self.retry.attempts:
            return None
        backoff = min(self.retry.longest_seconds, self.retry.first_seconds * 2.0 ** (self.made - 1))
        wait = max(asked_seconds, backoff * random.uniform(0.5, 1.0))
        if self.waited_seconds + wait > self.retry.total_seconds:
            return None
        self.waited_seconds += wait
        return wait


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and the parser of its answer. `retried` are the statuses after which to ask again."""

    method: str
    path: str
    parse: Callable[[Any], T]
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] | None = None
    retried: frozenset[int] = RETRIED

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        try:
            return http.build_request(self.method, self.path, json=self.body, headers=self.headers)
        except httpx.InvalidURL as error:
            raise CareClientError(
                f"{self.path[:SHOWN_PATH]}: no address ({error}); is this the id of a document?"
            ) from error
        except (TypeError, ValueError) as error:  # a date or a set; half of a surrogate pair; a number not finite
            raise CareClientError(f"cannot be sent as JSON: {error}") from error

    def pause(self, reply: Reply, attempts: Attempts) -> float | None:
        """Seconds to wait before the next attempt; None if this reply is the last."""
        if isinstance(reply, httpx.RequestError):
            return attempts.next_wait() if isinstance(reply, BROKEN) else None
        if reply.status_code in self.retried:
            return attempts.next_wait(_retry_after(reply))
        return None

    def checked(self, reply: Reply) -> httpx.Response:
        """Returns the response if it is an answer; raises its error if it is not."""
        if isinstance(reply, httpx.RequestError):
            reason = str(reply) or type(reply).__name__
            raise ConnectionFailed(f"no answer from {reply.request.url}: {reason}") from reply
        if reply.status_code == httpx.codes.OK:
            return reply
        try:
            raise _api_error(reply.status_code, reply.json())
        except UNREADABLE:
            # Not in the service's shape: something in between has answered.
            request_id = reply.headers.get("x-request-id", "")
            raise _kind(reply.status_code)(reply.status_code, "http", reply.reason_phrase, request_id) from None

    def read(self, reply: Reply) -> T:
        """Returns the parsed answer; raises if the reply is not one."""
        response = self.checked(reply)
        try:
            json = response.json()
        except UNREADABLE as error:
            raise BadAnswer(f"{response.request.url} answered with something that is not JSON") from error
        return _parsed(self.parse, json)


class Lines:
    """Reads a streamed answer line by line, and checks that it was whole."""

    def __init__(self) -> None:
        self._ended = False

    def read(self, line: str) -> Result | None:
        """Returns the result in a line; None for the last line; raises the service's error."""
        return _parsed(self._result, line)

    def _result(self, line: str) -> Result | None:
        json = loads(line)
        if "hits" in json:
            return Result.parse(json)
        if "error" in json:
            raise _api_error(200, json)
        if "results" in json:
            raise ValueError("one answer in place of lines; the Accept header did not reach the service")
        self._ended = bool(json["snapshot"])
        return None

    def end(self) -> None:
        """Raises if the last line was not the end of the answer."""
        if not self._ended:
            raise ConnectionFailed("the answer broke off before its last line")


def search(query: Texts, options: SearchOptions) -> Call[SearchAnswer]:
    return Call("POST", "/v1/search", SearchAnswer.parse, {"query": _plain(query), **options})


def stream(queries: Sequence[str], options: SearchOptions) -> Call[None]:
    """Its answer comes in lines, which `Lines` reads."""
    body = {"query": _listed(queries), **options}
    return Call("POST", "/v1/search", lambda json: None, body, {"accept": NDJSON})


def _path_of(id: str) -> str:
    try:
        quoted = quote(id, safe="")
    except UnicodeEncodeError as error:
        raise CareClientError(f"this id holds half of a surrogate pair: {error}") from error
    # Plain dots alone are steps in an address, and would lead to another path.
    return f"/v1/documents/{quoted.replace('.', '%2E') if quoted in ('.', '..') else quoted}"


def document(id: str) -> Call[Document]:
    return Call("GET", _path_of(id), Document.parse)


def add_documents(documents: Sequence[NewDocument]) -> Call[Changes]:
    return Call("POST", "/v1/documents", Changes.parse, {"documents": [dict(document) for document in documents]})


def delete_document(id: str) -> Call[Changes]:
    return Call("DELETE", _path_of(id), Changes.parse)


def collection() -> Call[Collection]:
    return Call("GET", "/v1/collection", Collection.parse)


def embeddings(texts: Texts, input_type: InputType, dimensions: int | None) -> Call[Embeddings]:
    # In base64 a vector takes a quarter of the bytes, and no bit is lost in decimals.
    body: dict[str, Any] = {"input": _plain(texts), "input_type": input_type, "encoding_format": "base64"}
    if dimensions is not None:
        body["dimensions"] = dimensions
    return Call("POST", "/v1/embeddings", Embeddings.parse, body)


def rerank(query: str, documents: Sequence[str], top_n: int | None) -> Call[tuple[Ranked, ...]]:
    body: dict[str, Any] = {"query": query, "documents": _listed(documents)}
    if top_n is not None:
        body["top_n"] = top_n
    return Call("POST", "/v1/rerank", Ranked.parse_all, body)


def health() -> Call[Health]:
    return Call("GET", "/readyz", Health.parse, retried=frozenset())


def _plain(texts: Texts) -> str | list[str]:
    return texts if isinstance(texts, str) else list(texts)


def _listed(texts: Texts) -> list[str]:
    """A text alone is one text, not its characters."""
    return [texts] if isinstance(texts, str) else list(texts)


def _parsed(parse: Callable[[Any], T], json: Any) -> T:  # noqa: ANN401 (any JSON)
    try:
        return parse(json)
    except UNREADABLE as error:
        raise BadAnswer(f"an answer that this client cannot read: {type(error).__name__}: {error}") from error


def _api_error(status: int, json: Json) -> ApiError:
    facts = json["error"]
    return _kind(status)(status, facts["code"], facts["message"], facts["request_id"], facts.get("field"))


def _kind(status: int) -> type[ApiError]:
    return KINDS.get(status, ApiError)


def _retry_after(response: httpx.Response) -> float:
    """Seconds of Retry-After; 0 without it, or if it is a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
