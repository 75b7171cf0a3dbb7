"""Baseline of the benchmark: a bare FastAPI app with a constant response, run by `servers.bare_server`."""

from __future__ import annotations

import os

from fastapi import FastAPI, Response

from loadtest.harness import PATH, READY

SIZE = "BARE_BYTES"


def create_app() -> FastAPI:
    """Builds an app with one route, at the path of the search; the environment sets the size of its response."""
    app = FastAPI(openapi_url=None)
    body = b"x" * int(os.environ[SIZE])

    @app.post(PATH)
    async def answer() -> Response:
        return Response(body, media_type="application/json")

    @app.get(READY)
    async def ready() -> Response:
        return Response()

    return app
