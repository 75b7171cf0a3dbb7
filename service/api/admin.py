"""/admin: which snapshot is served. For operators and the re-index job."""

from __future__ import annotations

import asyncio
import hmac
from ipaddress import ip_address

from fastapi import APIRouter, Depends, Request

from service.api.common import errors, runtime_of
from service.errors import Forbidden
from service.schemas import SwapAnswer, VersionsAnswer


def require_admin(request: Request) -> None:
    """The token, where one is set; else only a client on the same machine."""
    token = runtime_of(request).settings.admin_token
    if token is None:
        if request.client is None or not _is_loopback(request.client.host):
            raise Forbidden("set CARE_ADMIN_TOKEN to use /admin from another machine")
        # A browser on this machine may show a page of another site, which may send requests here.
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise Forbidden("set CARE_ADMIN_TOKEN to use /admin from a page of another site")
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token.get_secret_value()}".encode()):
        raise Forbidden("send the admin token as Authorization: Bearer …")


router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(require_admin)], responses=errors(403))


@router.post("/reload", responses=errors(409, 503))
async def reload(request: Request) -> SwapAnswer:
    """Serve what the pointer names, at once instead of at the next look."""
    servings = runtime_of(request).servings
    changed = await servings.reload()
    return SwapAnswer(snapshot=servings.current().version, changed=changed)


@router.post("/rollback", responses=errors(409, 422, 503))
async def rollback(request: Request, version: str | None = None) -> SwapAnswer:
    """Point to the version published before the current one, or to the one named, and serve it."""
    servings = runtime_of(request).servings
    changed = await servings.rollback(version)
    return SwapAnswer(snapshot=servings.current().version, changed=changed)


@router.get("/versions")
async def versions(request: Request) -> VersionsAnswer:
    """The versions on disk, the one that is published and the one that this process serves."""
    servings = runtime_of(request).servings
    known, current = await asyncio.to_thread(lambda: (servings.collection.versions(), servings.collection.current()))
    return VersionsAnswer(
        versions=known, current=current, serving=servings.serving, failed=servings.refusal_of(current)
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
