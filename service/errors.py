"""The service's errors, and the one table from an error to what a client sees of it.

The message of an error in the table is written for the client; of any other exception the client learns nothing but
the request id. Knows nothing of routes.
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
from models.errors import BadEncoder, CareError, SpaceMismatch, did_you_mean

RETRY_AFTER_SECONDS = 1
# Characters of an unknown name that are repeated in a message and compared with known names.
SHOWN_NAME = 100
FILTER_EXAMPLE = '[{"field": "kind", "eq": "drug"}]'


class InvalidRequest(CareError):
    """A request that cannot be answered as it stands; `field` is the field of the request that is wrong."""

    def __init__(self, path: str, message: str) -> None:
        """`path` leads to the wrong key, such as `documents[0].text`."""
        super().__init__(f"{path}: {message}")
        self.field = re.split(r"[.\[]", path, maxsplit=1)[0]


class BodyTooLarge(CareError):
    """A request body beyond the limit."""


class NotFound(CareError):
    """A path or a document that is not there."""


class MalformedHttp(CareError):
    """Bytes on the connection that are no HTTP request."""


class SlowRequest(CareError):
    """A request whose bytes took too long to arrive."""


class MethodNotAllowed(CareError):
    """A path that exists, asked in a way that it does not take."""


class UnknownHost(CareError):
    """A Host header that names none of the service's own names."""


class Forbidden(CareError):
    """A route for administrators, asked without the admin token."""


class FreshLimit(CareError):
    """More documents were posted since the last build than are searched beside a snapshot."""


class NotKept(CareError):
    """Documents that could not be written to the disk, and so were not taken."""


class Overloaded(CareError):
    """More waits than can be answered in time: refused, so that the accepted queries keep their latency."""

    def __init__(self, message: str, expected_seconds: float = 0.0) -> None:
        """`expected_seconds`: when the engine will have worked off what waits."""
        super().__init__(message)
        self.expected_seconds = expected_seconds


class DeadlineExceeded(CareError):
    """The request's own time limit passed before its answer was there."""


class NotReady(CareError):
    """There is nothing to answer from, or queries do not get through."""


class ShuttingDown(CareError):
    """The process is ending and takes no more queries."""


class EngineFailed(CareError):
    """The engine raised on the batch that held this query."""


class EngineAway(CareError):
    """The engine's process is not there: it died or hangs, and is being started again."""


class BadSettings(CareError):
    """A setting of the environment that cannot be used."""


class BadDevice(CareError):
    """A device to compute on that is not there, or not usable."""


class PortTaken(CareError):
    """The address to listen on is not to be had."""


class StartFailed(CareError):
    """A process of the service did not come up."""


STATUS_AND_CODE: Mapping[type[CareError], tuple[int, str]] = {
    MalformedHttp: (400, "malformed_http"),
    SlowRequest: (408, "slow_request"),
    InvalidRequest: (422, "invalid_request"),
    BadFilter: (422, "invalid_request"),
    BodyTooLarge: (413, "body_too_large"),
    NotFound: (404, "not_found"),
    MethodNotAllowed: (405, "method_not_allowed"),
    Forbidden: (403, "forbidden"),
    UnknownHost: (421, "unknown_host"),
    Overloaded: (429, "overloaded"),
    DeadlineExceeded: (504, "deadline_exceeded"),
    NotReady: (503, "not_ready"),
    ShuttingDown: (503, "shutting_down"),
    EngineFailed: (503, "engine_failed"),
    EngineAway: (503, "engine_away"),
    DatabaseAway: (503, "database_away"),
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
class ErrorAnswer:
    """An error as HTTP: status, further headers, and the body's facts."""

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


def answer_for(error: Exception) -> ErrorAnswer:
    """What a client sees of an exception."""
    for kind in type(error).__mro__:
        if kind in STATUS_AND_CODE:
            status, code = STATUS_AND_CODE[kind]
            name = "filters" if isinstance(error, BadFilter) else getattr(error, "field", None)
            wait = max(RETRY_AFTER_SECONDS, math.ceil(getattr(error, "expected_seconds", 0)))
            retry = (("Retry-After", str(wait)),) if status in (429, 503) else ()
            return ErrorAnswer(status, code, str(error), name, retry)
    return ErrorAnswer(*INTERNAL, "something went wrong here; the log has the reason under this request_id")


def invalid_request(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    """The first thing that pydantic found wrong with a model, in one line that begins with the path of the key."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if first["type"] == "missing":
        # A field of another name beside it is as a rule the one that is missing, misspelt.
        beside = (
            each for each in errors if each["type"] == "extra_forbidden" and each["loc"][:-1] == first["loc"][:-1]
        )
        first = next(beside, first)
    # If a field may be of several types, the type that got furthest is the one that was meant.
    for other in errors[1:]:
        if first["loc"] and other["loc"][0] == first["loc"][0] and len(other["loc"]) > len(first["loc"]):
            first = other
    path, known = _path(first["loc"], model)
    said = first["msg"].removeprefix("Value error, ").replace("Tuple", "List")
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:SHOWN_NAME]
        path = f"{path}.{name}".removeprefix(".")
        said = f"there is no such field{did_you_mean(name, known) or '; there are ' + ', '.join(known)}"
    if path.startswith("filters"):
        said += f"; for example {FILTER_EXAMPLE}"
    return InvalidRequest(path or "body", said)


def _path(place: Sequence[int | str], model: type[BaseModel]) -> tuple[str, list[str]]:
    """The place in a model as `documents[0].text`, and the names of the fields at its end.

    pydantic's places also hold names of union members, such as "list[str]", which mean nothing to a client.
    """
    path, inner = "", model
    names = _names(inner)
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in names:
            path += f".{part}"
            inner = _model_in(names[part].annotation) or inner
            names = _names(inner)
    return path.removeprefix("."), list(names)


def _names(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model that a field of this type holds, alone, in a list, or among other types."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
