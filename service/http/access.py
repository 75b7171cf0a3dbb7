"""Access control: the scope of each path, the key of a request, its rate, and the audit log of changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Any

from starlette.types import Scope as Request

from service.errors import Forbidden, NotFound, Unauthorized
from service.http.asgi import KEY
from service.keys import ID, KeyRing, write_audit
from service.limits import ANYONE, Key, Rates, Scope

logger = logging.getLogger(__name__)

SCOPE = "care.scope"  # of a request that takes more than the scope search
ACT = "care.act"
READS = ("GET", "HEAD")
PUBLIC, SEARCH = None, Scope.SEARCH  # a global is found in a third of the time of a member of an enum
METRICS = "/metrics"
# The scope that a path takes: to read, and to do anything else. What begins with a path and a slash belongs to it.
# Nothing is answered at any other path, so a route that is missing here is closed.
PATHS: dict[str, tuple[Scope | None, Scope | None]] = {
    "/v1/search": (Scope.SEARCH, Scope.SEARCH),
    "/v1/embeddings": (Scope.SEARCH, Scope.SEARCH),
    "/v1/rerank": (Scope.SEARCH, Scope.SEARCH),
    "/v1/models": (Scope.SEARCH, Scope.SEARCH),
    "/v1/collection": (Scope.SEARCH, Scope.SEARCH),
    "/v1/documents": (Scope.SEARCH, Scope.WRITE),
    "/admin": (Scope.ADMIN, Scope.ADMIN),
    METRICS: (Scope.ADMIN, Scope.ADMIN),
    "/livez": (PUBLIC, PUBLIC),
    "/readyz": (PUBLIC, PUBLIC),
    "/docs": (PUBLIC, PUBLIC),
    "/openapi.json": (PUBLIC, PUBLIC),
    "/static": (PUBLIC, PUBLIC),
    "/static-offline-docs": (PUBLIC, PUBLIC),
    "/": (PUBLIC, PUBLIC),
}
CLOSED = "this is closed, because there is no key; set CARE_ADMIN_TOKEN, or CARE_KEYS_FILE (care keys create)"
SEND_A_KEY = "send a key that is in force, as Authorization: Bearer … or api-key: …"
NOWHERE = "there is nothing at this path; /docs lists what there is"


def scope_of(method: str, path: str) -> Scope | None:
    """The scope that a request takes, PUBLIC if none; raises NotFound if nothing is at this path."""
    known = PATHS.get(path)
    if known is None:
        first, second, *_ = f"{path[1:]}/".split("/", 2)
        known = PATHS.get(f"/{first}/{second}") or (PATHS.get(f"/{first}") if first else None)
    if known is None:
        raise NotFound(NOWHERE)
    return known[method not in READS]


@dataclass(frozen=True, slots=True)
class Access:
    """Admits requests. Without a keys file, searches and metrics take no key.

    `admin_port` is the only port at which paths of scope admin are answered, None: any.
    """

    keys: KeyRing
    rates: Rates
    audit_log: Path | None = None
    admin_port: int | None = None

    def identify(self, request: Request, headers: Mapping[bytes, bytes]) -> Key:
        """Finds the key of a request; raises Unauthorized, Forbidden, or NotFound for a path that is not served."""
        keys, scope = self.keys, scope_of(request["method"], request["path"])
        if scope is SEARCH:
            if not keys.has_file:
                return ANYONE
        else:
            if scope is Scope.ADMIN and self.admin_port not in (None, (request.get("server") or (None, None))[1]):
                raise NotFound(NOWHERE)
            if scope is PUBLIC or (request["path"] == METRICS and not keys.has_file):
                return ANYONE
            request[SCOPE] = scope
        presented = headers.get(b"authorization", b"")
        is_bearer = presented[:7] == b"Bearer " or presented[:7].lower() == b"bearer "
        presented = presented[7:] if is_bearer else headers.get(b"api-key", b"")
        # Here and not in a method: a request meets this code cold, and a call costs it a microsecond.
        found = keys.found.get(presented[ID])
        if found is not None and compare_digest(presented, found[0]):
            key = found[1]
        elif presented and (known := keys.find(presented.strip())) is not None:
            key = known
        else:
            raise Forbidden(CLOSED) if keys.is_empty else Unauthorized(SEND_A_KEY)
        if scope not in key.scopes:
            request[KEY] = key  # for the logs
            raise Forbidden(f"this key lacks the scope {scope}; care keys create makes one that has it")
        return key

    def record(self, request: Request, request_id: str, status: int) -> None:
        """Writes a change, an act of an administrator, or an attempt at one to the audit log; never a text."""
        if self.audit_log is None or SCOPE not in request:
            return
        if request["method"] in READS and status not in (401, 403):
            return
        key: Key = request.get(KEY, ANYONE)
        act = {"key": key.name, "act": f"{request['method']} {route_of(request)}", "status": status}
        details: dict[str, Any] = request.get(ACT, {})
        try:
            write_audit(self.audit_log, {**act, "request_id": request_id, **details})
        except OSError as error:
            logger.error("the audit log %s lacks the act of request %s: %s", self.audit_log, request_id, error)


def route_of(request: Request) -> str:
    """The template of the route, or the part of the path that has a scope: the rest may be private."""
    if (route := request.get("route")) is not None:
        return str(route.path)
    return next((path for path in PATHS if path != "/" and request["path"].startswith(path)), "/")
