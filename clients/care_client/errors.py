"""Exceptions that the client raises, in one tree."""

from __future__ import annotations


class CareClientError(Exception):
    """Any failure of a call."""


class ConnectionFailed(CareClientError):
    """No answer: the service is not reachable, or the connection broke or timed out."""


class BadAnswer(CareClientError):
    """An answer that is not the service's: another program listens at this address, or it is another version."""


class ApiError(CareClientError):
    """An error answer: HTTP `status`, `code` for programs, `message` for people.

    `field` is the wrong part of the request, if there is one; `request_id` finds the call in the service's log.
    """

    def __init__(self, status: int, code: str, message: str, request_id: str = "", field: str | None = None) -> None:
        super().__init__(f"{status} {code}: {message}" + (f" (request {request_id})" if request_id else ""))
        self.status = status
        self.code = code
        self.message = message
        self.request_id = request_id
        self.field = field


class InvalidRequest(ApiError):
    """A parameter that the service does not take; another try will not help."""


class NotFound(ApiError):
    """No such document, or no such path."""


class Overloaded(ApiError):
    """Too many requests were waiting, also after the retries."""


class Unavailable(ApiError):
    """The service cannot answer now, also after the retries."""


class DeadlineExceeded(ApiError):
    """The answer would have taken longer than `timeout_ms`."""


KINDS: dict[int, type[ApiError]] = {
    400: InvalidRequest,
    404: NotFound,
    413: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}
