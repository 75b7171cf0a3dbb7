"""What the routes share: the way to the runtime, JSON in, and the error answers for /docs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from service.errors import InvalidRequest, invalid_request
from service.http import WhileConnected, read_body, send_bytes
from service.runtime import Runtime
from service.schemas import ErrorAnswer
from service.serving import Serving

Model = TypeVar("Model", bound=BaseModel)

ERRORS: dict[int, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": description}
    for status, description in {
        403: "Not an administrator",
        404: "No such document or model",
        408: "The request took too long to arrive",
        409: "The snapshot was refused, and the one in service stays; or it is time to re-index",
        413: "Body too large",
        422: "A field of the request is wrong",
        429: "Too many queries are waiting: see Retry-After",
        503: "Nothing is served, or the engine failed: see Retry-After",
        504: "The time for this request was over before the answer was there",
    }.items()
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error answers that a route may give, for FastAPI's `responses`."""
    return {status: ERRORS[status] for status in statuses}


def runtime_of(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


def parse_body(model: type[Model], body: bytes) -> Model:
    """A JSON body, straight from its bytes; what is wrong is said with the field's name."""
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        if not _is_utf8(body):
            first = next(iter(model.model_fields))
            raise InvalidRequest(first, "the body is not UTF-8") from None
        raise invalid_request(error, model) from None


class JsonRoute(Generic[Model]):
    """An ASGI endpoint: a JSON body in, bytes of JSON out. The runtime is found on the app when a request comes."""

    def __init__(self, model: type[Model], answer: Callable[[Runtime, Serving, Model], Awaitable[bytes]]) -> None:
        self._model = model
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime: Runtime = scope["app"].state.runtime
        request = parse_body(self._model, await read_body(scope, receive, runtime.settings.max_body_bytes))
        serving = runtime.servings.current()
        async with WhileConnected(receive):
            answer = await self._answer(runtime, serving, request)
        await send_bytes(send, answer)


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
