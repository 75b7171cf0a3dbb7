"""/livez, /readyz and /metrics: for the machines that watch the service."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from service.api.common import ERRORS, runtime_of
from service.schemas import StatusAnswer

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> StatusAnswer:
    """The process runs."""
    return StatusAnswer(status="alive")


@router.get("/readyz", responses={503: ERRORS[503]})
async def readyz(request: Request) -> StatusAnswer:
    """A real query just went through the snapshot that is served."""
    runtime = runtime_of(request)
    serving = runtime.servings.current()
    await runtime.searcher.probe(serving)
    return StatusAnswer(status="ready", snapshot=serving.version)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(runtime_of(request).metrics.expose(), media_type=CONTENT_TYPE_LATEST)
