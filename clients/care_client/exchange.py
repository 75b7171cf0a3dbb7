"""Replies and what they mean: an answer, an error, or a reason to ask again. Sends nothing and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from json import loads
from typing import Any, TypeVar

import httpx

from care_client.answers import Json, Result
from care_client.errors import KINDS, ApiError, BadAnswer, ConnectionFailed
from care_client.retry import Attempts

T = TypeVar("T")
Reply = httpx.Response | httpx.RequestError
"""What an attempt came to: a response whose body is loaded, or the reason why there is none."""

RETRIED = frozenset({429, 503})
# What befalls a connection, not a request: the same call may well get through the next time. A read that timed out is
# not among them, since asking again would only add to the work of a service that is slow already.
BROKEN = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


def pause(reply: Reply, attempts: Attempts, answers: Collection[int]) -> float | None:
    """Seconds to wait before the next attempt; None where this reply is the last."""
    if isinstance(reply, httpx.RequestError):
        return attempts.next_wait() if isinstance(reply, BROKEN) else None
    if reply.status_code in RETRIED and reply.status_code not in answers:
        return attempts.next_wait(_retry_after(reply))
    return None


def checked(reply: Reply, answers: Collection[int]) -> httpx.Response:
    """The response, where its status is that of an answer; raises what the reply stands for where it is not."""
    if isinstance(reply, httpx.RequestError):
        raise ConnectionFailed(f"no answer from {reply.request.url}: {str(reply) or type(reply).__name__}") from reply
    if reply.status_code in answers:
        return reply
    try:
        raise api_error(reply.status_code, reply.json())
    except (ValueError, LookupError, TypeError, AttributeError):
        # Not in the service's shape: something in between has answered.
        request_id = reply.headers.get("x-request-id", "")
        raise _kind(reply.status_code)(reply.status_code, "http", reply.reason_phrase, request_id) from None


def parsed(parse: Callable[[Any], T], json: Any) -> T:  # noqa: ANN401 (whatever JSON came)
    """The answer in a body; raises BadAnswer where the body is not what `parse` reads."""
    try:
        return parse(json)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadAnswer(f"an answer that this client cannot read: {type(error).__name__}: {error}") from error


def body_of(response: httpx.Response) -> Any:  # noqa: ANN401
    """The JSON of a response; raises BadAnswer where it holds none."""
    try:
        return response.json()
    except ValueError as error:
        raise BadAnswer(f"{response.request.url} answered with something that is not JSON") from error


def api_error(status: int, json: Json) -> ApiError:
    """The error that a body of the service's describes."""
    facts = json["error"]
    return _kind(status)(status, facts["code"], facts["message"], facts["request_id"], facts.get("field"))


class Lines:
    """Reads a streamed answer line by line, and knows whether it was whole."""

    def __init__(self) -> None:
        self._ended = False

    def read(self, line: str) -> Result | None:
        """The result in a line; None for the last line, which holds none; raises where the service gave up midway."""
        return parsed(self._result, line)

    def _result(self, line: str) -> Result | None:
        json = loads(line)
        if "hits" in json:
            return Result.parse(json)
        if "error" in json:
            raise api_error(200, json)
        self._ended = bool(json["snapshot"])
        return None

    def end(self) -> None:
        """To be called after the last line: a stream that broke off looks like one that is over."""
        if not self._ended:
            raise ConnectionFailed("the answer broke off before its last line")


def _kind(status: int) -> type[ApiError]:
    return KINDS.get(status, ApiError)


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the service asks to wait; 0 where it does not say, or says it as a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
