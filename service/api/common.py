"""What the routes share: the way to the runtime, and the error answers for /docs."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from service.runtime import Runtime
from service.schemas import ErrorAnswer

ERRORS: dict[int, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in {
        403: "Not an administrator",
        404: "No such document",
        409: "The snapshot was refused; the one in service stays",
        413: "Body too large",
        422: "A field of the request is wrong",
        429: "Too many queries are waiting: see Retry-After",
        503: "Nothing is served, or the engine failed",
    }.items()
}


def runtime_of(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime
