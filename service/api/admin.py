"""/admin: which snapshot is served. For operators and the re-index job."""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.api.common import errors, runtime_of
from service.errors import Forbidden
from service.schemas import SwapAnswer, VersionsAnswer

SECURITY_SCHEME = "admin_token"
CLOSED = (
    "changes are closed, because no admin token is set; set CARE_ADMIN_TOKEN and send it as Authorization: Bearer …"
)
bearer = HTTPBearer(auto_error=False, scheme_name=SECURITY_SCHEME, description="The value of CARE_ADMIN_TOKEN")


def require_admin(request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
    """Raises Forbidden unless the request carries the admin token."""
    token = runtime_of(request).settings.admin_token
    if token is None:
        raise Forbidden(CLOSED)
    sent = "" if given is None else given.credentials
    if not hmac.compare_digest(sent.encode(), token.get_secret_value().encode()):
        raise Forbidden("send the admin token (CARE_ADMIN_TOKEN) as Authorization: Bearer …")


router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(require_admin)], responses=errors(403))


@router.post("/reload", responses=errors(409, 503))
async def reload(request: Request) -> SwapAnswer:
    """Serve what the pointer names, at once instead of at the next look."""
    servings = runtime_of(request).servings
    changed = await servings.reload()
    return SwapAnswer(snapshot=servings.current().version, changed=changed)


@router.post("/rollback", responses=errors(409, 422, 503))
async def rollback(request: Request, version: str | None = None, force: bool = False) -> SwapAnswer:
    """Point to the version published before the current one, or to the one named, and serve it.

    A version that fails a canary of the collection is refused; `force` skips the canaries.
    """
    servings = runtime_of(request).servings
    changed = await servings.rollback(version, force=force)
    return SwapAnswer(snapshot=servings.current().version, changed=changed)


@router.get("/versions")
async def versions(request: Request) -> VersionsAnswer:
    """The versions on disk, the one that is published and the one that this process serves."""
    servings = runtime_of(request).servings
    known, current = await asyncio.to_thread(lambda: (servings.collection.versions(), servings.collection.current()))
    return VersionsAnswer(
        versions=known, current=current, serving=servings.serving, failed=servings.refusal_of(current)
    )
