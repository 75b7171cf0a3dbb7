"""What can go wrong with a call: one tree, from which a program catches as much as it wants to handle."""

from __future__ import annotations


class CareClientError(Exception):
    """Any failure of a call."""


class ConnectionFailed(CareClientError):
    """No answer came: the service is not there, or the connection broke or timed out."""


class BadAnswer(CareClientError):
    """An answer came that is not the service's: something else listens at this address, or it is another version."""


class ApiError(CareClientError):
    """The service answered that it does not do what was asked.

    `status` is that of HTTP; `code` names the error for a program, `message` for a person, `field` is the part of the
    request that is wrong, where one is; `request_id` finds the call in the service's log.
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
