"""A search passes only the service's own middleware and route, and no layer of the framework."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from service.http.app import create_app
from service.http.asgi import SearchRoute
from service.http.middleware import RequestFrame
from service.settings import Settings


def layers(app: ASGIApp | None) -> Iterator[ASGIApp]:
    """Yields an application and everything that it wraps, as Starlette's middleware and ours name it."""
    while app is not None:
        yield app
        app = getattr(app, "app", None) or getattr(app, "_app", None)


def test_a_search_bypasses_the_framework() -> None:
    stack = create_app(Settings()).build_middleware_stack()
    assert [type(layer) for layer in layers(stack.hot)] == [RequestFrame, SearchRoute]  # type: ignore[attr-defined]


def test_no_request_runs_in_an_extra_task() -> None:
    stack = create_app(Settings()).build_middleware_stack()
    wrapped = list(layers(stack.rest))  # type: ignore[attr-defined]
    assert sum(isinstance(layer, RequestFrame) for layer in wrapped) == 1
    assert not any(isinstance(layer, BaseHTTPMiddleware) for layer in wrapped)
