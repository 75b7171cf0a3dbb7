"""The application factory: `create_app(settings)` puts routes, middleware and pages together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.routing import Match, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from models.errors import CareError
from models.package import care_version
from service.errors import BadSettings, InvalidRequest, MethodNotAllowed, NotFound, answer_for
from service.http import admin, documents, texts
from service.http.asgi import REQUEST_ID, SEARCH_METHODS, SEARCH_PATH, SearchRoute
from service.http.middleware import NOWHERE, Access, HotPath, RequestFrame, host_pattern, with_cors
from service.http.openapi import describe
from service.keys import KeyRing, require_audit_log
from service.limits import Rates
from service.metrics import Metrics
from service.runtime import ALONE, Place, run_parts
from service.settings import Settings

if TYPE_CHECKING:
    from service.traces import Traces

WEB_FOLDER = Path(__file__).parents[1] / "web"
PAGE = "/"
DOCS = "/docs"
STATIC = "/static"
# A page runs only its own scripts, calls only this service, and is shown in no frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"Content-Security-Policy": POLICY}
TITLE = "CARE Search"
METHODS = ("DELETE", "GET", "HEAD", "POST")
# Spans and metrics of requests would carry URLs, and URLs carry medical questions.
NO_TELEMETRY = {"tracing": False, "metrics": False, "logs": False}
# Routes outside FastAPI, which names its own in the scope.
LEAN_PATHS = frozenset({SEARCH_PATH, texts.EMBEDDINGS, texts.RERANK, PAGE, DOCS, STATIC})
DESCRIPTION = 'Search by meaning and by words. Every error has one shape: `{"error": {"code", "message", …}}`.'


def create_app(settings: Settings, place: Place = ALONE) -> FastAPI:
    """Builds the service as an ASGI application; its lifespan opens and closes everything."""
    metrics = Metrics()
    rates = Rates.from_settings(settings)
    access = Access(KeyRing.from_settings(settings), rates, settings.audit_log, settings.admin_port)
    require_audit_log(settings.audit_log)
    traces = _open_traces(settings, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sending = contextlib.nullcontext() if traces is None else traces.sending()
        async with sending, run_parts(settings, metrics, access.keys, rates, place) as runtime:
            app.state.runtime = runtime
            yield

    app = FastAPIOffline(
        title=TITLE,
        version=care_version(),
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        telemetry=NO_TELEMETRY,
        # A redirection names scheme and host as this process sees them: http behind a proxy with TLS.
        redirect_slashes=False,
    )
    frame = partial(
        RequestFrame,
        metrics=metrics,
        access=access,
        paths=LEAN_PATHS,
        hosts=host_pattern(settings.host_names),
        access_log=settings.access_log,
        traces=traces,
    )
    app.add_middleware(frame)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(RequestValidationError, _answer_bad_parameter)
    search_route = SearchRoute()
    app.router.routes += [
        Route(SEARCH_PATH, search_route, methods=SEARCH_METHODS, include_in_schema=False),
        Route(texts.EMBEDDINGS, texts.embeddings_route, methods=texts.METHODS, include_in_schema=False),
        Route(texts.RERANK, texts.rerank_route, methods=texts.METHODS, include_in_schema=False),
    ]
    for router in (documents.router, admin.collection, texts.router, admin.admin, admin.health):
        app.include_router(router)
    app.add_route(PAGE, partial(_page, "index.html"), include_in_schema=False)
    app.add_route(DOCS, partial(_page, "docs.html"), include_in_schema=False)
    app.mount(STATIC, _WholeFiles(directory=WEB_FOLDER), name="static")
    app.openapi = describe(app, settings)  # type: ignore[method-assign]
    layers, hot = app.build_middleware_stack, frame(search_route)

    def stack() -> ASGIApp:
        whole = HotPath(SEARCH_PATH, SEARCH_METHODS, hot, layers())
        return with_cors(whole, settings.origins) if settings.origins else whole

    app.build_middleware_stack = stack  # type: ignore[method-assign]
    app.state.frame = hot
    return app


def _open_traces(settings: Settings, metrics: Metrics) -> Traces | None:
    if settings.traces_url is None:
        return None
    try:
        from service.traces import Traces
    except ImportError as error:
        raise BadSettings(
            f"CARE_TRACES_URL needs the traces extra ({error}): pip install care-search[traces]"
        ) from None
    return Traces(settings, metrics)


class _WholeFiles(StaticFiles):
    """Sends files whole: they are small, and the framework answers a bad Range in another error shape."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(_without_range(scope), receive, send)


async def _page(name: str, request: Request) -> Response:
    request.scope["headers"] = _without_range(request.scope)["headers"]
    return FileResponse(WEB_FOLDER / name, headers=PAGE_HEADERS)


def _without_range(scope: Scope) -> Scope:
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"range"]}


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answers the framework's own errors in the service's error shape."""
    assert isinstance(error, HTTPException)
    known: dict[int, CareError] = {
        404: NotFound(NOWHERE),
        405: MethodNotAllowed("this path does not take this method; /docs says which it takes"),
    }
    headers = error.headers
    if error.status_code == 405 and (allowed := _allowed_methods(request)):
        headers = {"Allow": ", ".join(allowed)}
    return _error(request, known.get(error.status_code, error), headers)


def _allowed_methods(request: Request) -> list[str]:
    """The methods of all routes at this path; the framework names those of the first one alone."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]  # folders of files take any path
    return [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]


async def _answer_bad_parameter(request: Request, error: Exception) -> Response:
    """Answers a URL parameter that FastAPI cannot read in the service's error shape."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _error(request, InvalidRequest(str(first["loc"][-1]), first["msg"]))


def _error(request: Request, error: Exception, headers: Mapping[str, str] | None = None) -> Response:
    answer = answer_for(error)
    body = answer.body(request.scope[REQUEST_ID])
    return Response(body, answer.status, {**(headers or {}), **dict(answer.headers)}, media_type="application/json")
