"""The application factory: `create_app(settings)` wires the parts; nothing happens at import."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from models.errors import CareError
from service.api import admin, collection, health, search
from service.api.openapi import describe
from service.errors import MethodNotAllowed, NotFound, answer_for
from service.metrics import Metrics
from service.middleware import REQUEST_ID, RequestFrame
from service.runtime import run_parts
from service.settings import Settings

WEB_FOLDER = Path(__file__).parent / "web"
PAGE = "/"
STATIC = "/static"
TITLE = "CARE Search"
DESCRIPTION = 'Search by meaning and by words. Every error has one shape: `{"error": {"code", "message", …}}`.'


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application; its lifespan opens and closes everything."""
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with run_parts(settings, metrics) as runtime:
            app.state.runtime = runtime
            yield

    app = FastAPIOffline(title=TITLE, version=_version(), description=DESCRIPTION, redoc_url=None, lifespan=lifespan)
    paths = frozenset({search.PATH, PAGE, STATIC})
    app.add_middleware(RequestFrame, metrics=metrics, paths=paths, access_log=settings.access_log)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    # First in the list, so that the hot route is matched first.
    hot = Route(search.PATH, search.SearchRoute(), methods=search.METHODS, include_in_schema=False)
    app.router.routes.insert(0, hot)
    app.include_router(collection.router)
    app.include_router(admin.router)
    app.include_router(health.router)
    app.add_route(PAGE, _index, include_in_schema=False)
    app.mount(STATIC, _WholeFiles(directory=WEB_FOLDER), name="static")
    app.openapi = describe(app, settings.max_top_k)  # type: ignore[method-assign]
    return app


def _version() -> str:
    try:
        return version("care-search")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


class _WholeFiles(StaticFiles):
    """Files are sent whole: they are small, and the framework answers a bad Range in a shape of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(_without_range(scope), receive, send)


async def _index(request: Request) -> Response:
    request.scope["headers"] = _without_range(request.scope)["headers"]
    return FileResponse(WEB_FOLDER / "index.html")


def _without_range(scope: Scope) -> Scope:
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"range"]}


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """What the framework refuses, in the shape that every error has."""
    assert isinstance(error, HTTPException)
    known: dict[int, CareError] = {
        404: NotFound("there is nothing at this path; /docs lists what there is"),
        405: MethodNotAllowed("this path does not take this method; /docs says which it takes"),
    }
    answer = answer_for(known.get(error.status_code, error))
    headers = dict(error.headers or {}) | dict(answer.headers)
    return Response(answer.body(request.scope[REQUEST_ID]), answer.status, headers, media_type="application/json")
