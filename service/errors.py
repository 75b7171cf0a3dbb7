"""Exceptions of the service, and the table from an exception to its HTTP status.

Messages of errors in the table reach the client. Any other exception is answered with the request id alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import orjson
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from indexer.errors import BadCollection, BadFilter, BadLog, BadQueries, BadSnapshot, DatabaseAway
from models.errors import BadEncoder, CareError, EncoderAway, EncoderMoved, SpaceMismatch, did_you_mean

RETRY_AFTER_SECONDS = 1
SHOWN_NAME = 100  # characters of an unknown name that a message repeats
FILTER_EXAMPLE = '[{"field": "kind", "eq": "drug"}]'


class InvalidRequest(CareError):
    """A request that cannot be answered as it stands; `field` is the wrong field of the request."""

    def __init__(self, path: str, message: str) -> None:
        """`path` leads to the wrong key, such as `documents[0].text`."""
        super().__init__(f"{path}: {message}")
        self.field = re.split(r"[.\[]", path, maxsplit=1)[0]


class BodyTooLarge(CareError):
    """A request body beyond the limit."""


class NotFound(CareError):
    """A path or a document that does not exist."""


class MalformedHttp(CareError):
    """Bytes on the connection that are not an HTTP request."""


class SlowRequest(CareError):
    """A request whose bytes took too long to arrive."""


class MethodNotAllowed(CareError):
    """A method that the path does not take."""


class UnknownHost(CareError):
    """A Host header with a name that is not served."""


class BadKeys(CareError):
    """A file of API keys that cannot be used, or a change of it that is not possible."""


class Unauthorized(CareError):
    """A request without a key, or with one that is not in force."""


class Forbidden(CareError):
    """A request whose key lacks the scope."""


class RateLimited(CareError):
    """A request beyond the rate or the budget of its key."""

    def __init__(self, message: str, expected_seconds: float) -> None:
        """`expected_seconds`: until there is room again."""
        super().__init__(message)
        self.expected_seconds = expected_seconds


class CrowdedAddress(CareError):
    """A connection beyond those that one address may hold."""


class Crowded(CareError):
    """A connection beyond those that the process may hold."""


class IdTaken(CareError):
    """An id of a document that the key may not change."""


class FreshLimit(CareError):
    """More documents posted since the last build than are searched beside a snapshot."""


class NotKept(CareError):
    """A change that could not be written to disk, and was not accepted."""


class Overloaded(CareError):
    """A request refused because the queue is too long."""

    def __init__(self, message: str, expected_seconds: float = 0.0) -> None:
        """`expected_seconds`: when the engine will have emptied the queue."""
        super().__init__(message)
        self.expected_seconds = expected_seconds


class DeadlineExceeded(CareError):
    """The request's time limit passed before its answer was ready."""


class NotReady(CareError):
    """No snapshot is served, or queries are not answered."""


class ShuttingDown(CareError):
    """The process is ending and accepts no more queries."""


class EngineFailed(CareError):
    """The engine raised on the batch that held this query."""


class EngineAway(CareError):
    """The engine process died or hangs, and is being restarted."""


class BadSettings(CareError):
    """A setting of the environment that cannot be used."""


class BadDevice(CareError):
    """A compute device that is missing or not usable."""


class PortTaken(CareError):
    """The address to listen on is already in use."""


class StartFailed(CareError):
    """A process of the service did not start."""


STATUS_AND_CODE: Mapping[type[CareError], tuple[int, str]] = {
    MalformedHttp: (400, "malformed_http"),
    SlowRequest: (408, "slow_request"),
    InvalidRequest: (422, "invalid_request"),
    BadFilter: (422, "invalid_request"),
    BodyTooLarge: (413, "body_too_large"),
    NotFound: (404, "not_found"),
    MethodNotAllowed: (405, "method_not_allowed"),
    Unauthorized: (401, "unauthorized"),
    Forbidden: (403, "forbidden"),
    RateLimited: (429, "rate_limited"),
    CrowdedAddress: (429, "crowded_address"),
    Crowded: (503, "crowded"),
    IdTaken: (409, "id_taken"),
    UnknownHost: (421, "unknown_host"),
    Overloaded: (429, "overloaded"),
    DeadlineExceeded: (504, "deadline_exceeded"),
    NotReady: (503, "not_ready"),
    ShuttingDown: (503, "shutting_down"),
    EngineFailed: (503, "engine_failed"),
    EngineAway: (503, "engine_away"),
    DatabaseAway: (503, "database_away"),
    EncoderAway: (503, "encoder_away"),
    EncoderMoved: (503, "encoder_moved"),
    FreshLimit: (409, "fresh_limit"),
    BadLog: (503, "bad_log"),
    NotKept: (503, "not_kept"),
    BadCollection: (409, "bad_collection"),
    BadQueries: (409, "bad_canaries"),
    BadSnapshot: (409, "bad_snapshot"),
    BadEncoder: (409, "bad_encoder"),
    SpaceMismatch: (409, "space_mismatch"),
}
INTERNAL = (500, "internal")


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error as HTTP: status, further headers, and the facts of its body."""

    status: int
    code: str
    message: str
    field: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def header_pairs(self) -> list[tuple[bytes, bytes]]:
        return [(name.lower().encode(), value.encode()) for name, value in self.headers]

    def body(self, request_id: str) -> bytes:
        facts: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.field is not None:
            facts["field"] = self.field
        return orjson.dumps({"error": facts | {"request_id": request_id}})


def answer_for(error: Exception) -> ErrorResponse:
    """Returns what a client sees of an exception."""
    for kind in type(error).__mro__:
        if kind in STATUS_AND_CODE:
            status, code = STATUS_AND_CODE[kind]
            name = "filters" if isinstance(error, BadFilter) else getattr(error, "field", None)
            wait = max(RETRY_AFTER_SECONDS, math.ceil(getattr(error, "expected_seconds", 0)))
            headers = (("Retry-After", str(wait)),) if status in (429, 503) else ()
            headers = (("WWW-Authenticate", "Bearer"),) if status == 401 else headers
            return ErrorResponse(status, code, str(error), name, headers)
    return ErrorResponse(*INTERNAL, "something went wrong here; the log has the reason under this request_id")


def invalid_request(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """Turns pydantic's first error into one line that begins with the path of the wrong key."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "missing":
        # An unknown field beside a missing one is usually the missing one, misspelt.
        beside = (e for e in errors if e["type"] == "extra_forbidden" and e["loc"][:-1] == first["loc"][:-1])
        first = next(beside, first)
    # If a field may have several types, the longest path belongs to the type that was meant.
    for other in errors[1:]:
        if first["loc"] and other["loc"][0] == first["loc"][0] and len(other["loc"]) > len(first["loc"]):
            first = other
    path, known = _path(first["loc"], model)
    message = first["msg"].removeprefix("Value error, ").replace("Tuple", "List")
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:SHOWN_NAME]
        path = f"{path}.{name}".removeprefix(".")
        message = f"there is no such field{did_you_mean(name, known) or '; there are ' + ', '.join(known)}"
    if path.startswith("filters"):
        message += f"; for example {FILTER_EXAMPLE}"
    return InvalidRequest(path or "body", message)


def _path(location: Sequence[int | str], model: type[BaseModel]) -> tuple[str, list[str]]:
    """Writes pydantic's location as `documents[0].text`; returns it and the field names of the model at its end.

    Names of union members in a location, such as "list[str]", are left out.
    """
    path, names = "", _names(model)
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in names:
            path += f".{part}"
            model = _model_in(names[part].annotation) or model
            names = _names(model)
    return path.removeprefix("."), list(names)


def _names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Finds the model in a field's type: alone, in a list, or in a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
