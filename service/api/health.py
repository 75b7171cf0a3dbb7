"""/livez, /readyz and /metrics: for the machines that watch the service."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from service.api.common import errors, runtime_of
from service.schemas import StatusAnswer

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> StatusAnswer:
    """The process runs."""
    return StatusAnswer(status="alive")


@router.get("/readyz", responses=errors(503))
async def readyz(request: Request) -> StatusAnswer:
    """A real query just went through the snapshot that is served."""
    runtime = runtime_of(request)
    serving = runtime.servings.current()
    await runtime.searcher.probe(serving)
    return StatusAnswer(status="ready", snapshot=serving.version)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus metrics, of all workers together."""
    # In a thread: the numbers of many processes take a while to add up.
    exposed = await asyncio.to_thread(runtime_of(request).metrics.expose)
    return Response(exposed, media_type=CONTENT_TYPE_LATEST)
