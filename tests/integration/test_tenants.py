"""A key with a filter never sees, counts or changes documents of others; `make fuzz-tenants`: 100,000 requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.cache.cache import ResultKeys
from service.http import admin
from service.serving.serving import Serving
from service.updates.writer import _Known
from tests.integration.redis_support import valkey
from tests.support.tenants import TENANTS, Leak, fuzz

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.mark.parametrize("shared", [False, True], ids=["process cache", "redis"])
async def test_tenants_share_nothing(tmp_path: Path, kept: Path, pytestconfig: pytest.Config, shared: bool) -> None:
    requests, seed = pytestconfig.getoption("--requests"), pytestconfig.getoption("--seed")
    if shared:
        with valkey() as server:
            counts = await fuzz(tmp_path, requests, seed, f"redis://127.0.0.1:{server.port}/0", kept)
    else:
        counts = await fuzz(tmp_path, requests, seed + 1, kept=kept)
    print(dict(counts))
    assert all(counts[f"{tenant} 200"] for tenant in (*TENANTS, "all"))


CALL, FIELDS, DOCUMENTS = ResultKeys.__call__, Serving.fields, Serving.documents
LEAKS: dict[str, tuple[object, str, Callable[..., Any]]] = {
    "cache": (ResultKeys, "__call__", lambda self, serving, request, queries, _: CALL(self, serving, request, queries)),
    "get by id": (Serving, "row_within", lambda self, name, within: self.overlay.row_of(name)),
    "search": (Serving, "fix", lambda self, filters: ()),
    "examples of errors": (Serving, "require_filters", lambda self, filters, within: self.allowed(filters)),
    "names of fields": (Serving, "fields", lambda self, within=(): FIELDS(self)),
    "count": (Serving, "documents", lambda self, within=(): DOCUMENTS(self)),
    "facets": (admin, "count_facets", lambda serving, within: serving.facets),
    "samples": (admin, "sample_documents", lambda serving, within, real=admin.sample_documents: real(serving)),
    "numbers": (admin, "number_ranges", lambda serving, within, real=admin.number_ranges: real(serving)),
    "replaced by another": (_Known, "require_own", lambda self, documents, within: None),
    "deleted by another": (_Known, "is_within", lambda self, name, within: True),
}


@pytest.mark.parametrize("leak", LEAKS)
async def test_a_planted_leak_is_found(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, leak: str) -> None:
    monkeypatch.setattr(*LEAKS[leak])
    with pytest.raises(Leak):
        await fuzz(tmp_path, 20_000, 1, kept=kept)
