"""The part of Qdrant's REST API that the project uses, on a real socket, over the local mode of Qdrant's client.

Bodies are parsed by the models that Qdrant generates from its API description, which refuse unknown fields, and
searched by its Python re-implementation. As in the real server, queries of fp16 vectors are rounded to fp16 first.
The graph, the shards and the timing of the real server are not simulated; `test_qdrant.py --qdrant` runs against one.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from pydantic import BaseModel
from qdrant_client import QdrantClient, models

from tests.support.http_thread import QuietHandler, serving_http

Refuse = Callable[[str, str], int | None]
"""Method and path in; a status to answer instead of doing it, or None."""


class QdrantServer:
    """State that a test reads and sets. `asked` counts the requests by method and the last word of the path."""

    def __init__(self) -> None:
        self.local = QdrantClient(":memory:")
        self.asked: Counter[str] = Counter()
        self.parameters: list[models.SearchParams] = []
        self.graphs: dict[str, models.HnswConfigDiff] = {}
        self.indexes: set[tuple[str, str, str]] = set()
        self.statuses: list[models.CollectionStatus] = []
        """Statuses that collections report before their index is finished."""
        self.keeps_metadata = True
        self.away = False
        """Closes every connection. The port stays taken, so that no other program gets it."""
        self.key: str | None = None
        self.refuse: Refuse = lambda method, path: None
        self.port = 0

    def where(self, alias: str = "care") -> str:
        return f"qdrant+http://127.0.0.1:{self.port}/{alias}"

    def aliases(self) -> dict[str, str]:
        return {one.alias_name: one.collection_name for one in self.local.get_aliases().aliases}

    def collections(self) -> list[str]:
        return sorted(one.name for one in self.local.get_collections().collections)

    def answer(self, method: str, path: str, body: bytes) -> object:
        for pattern, own in _ROUTES.items():
            if (matched := re.fullmatch(pattern, f"{method} {path}")) is not None:
                return own(self, *matched.groups(), body)
        raise ValueError(f"no such route: {method} {path}")

    def create(self, name: str, body: bytes) -> bool:
        asked = models.CreateCollection.model_validate_json(body)
        assert asked.hnsw_config is not None
        self.graphs[name] = asked.hnsw_config
        metadata = asked.metadata if self.keeps_metadata else None
        return self.local.create_collection(name, asked.vectors, metadata=metadata)

    def update(self, name: str, body: bytes) -> bool:
        metadata = models.UpdateCollection.model_validate_json(body).metadata
        return metadata is None or not self.keeps_metadata or self.local.update_collection(name, metadata=metadata)

    def describe(self, name: str, body: bytes) -> BaseModel:
        found = self.local.get_collection(name)
        return found.model_copy(update={"status": self.statuses.pop(0)}) if self.statuses else found

    def exists(self, name: str, body: bytes) -> object:
        return {"exists": self.local.collection_exists(name)}

    def delete(self, name: str, body: bytes) -> bool:
        return self.local.delete_collection(name)

    def index(self, name: str, body: bytes) -> BaseModel:
        asked = models.CreateFieldIndex.model_validate_json(body)
        self.indexes.add((name, asked.field_name, str(asked.field_schema)))
        return models.UpdateResult(operation_id=0, status=models.UpdateStatus.COMPLETED)

    def upsert(self, name: str, body: bytes) -> BaseModel:
        return self.local.upsert(name, models.PointsBatch.model_validate_json(body).batch)

    def remove(self, name: str, body: bytes) -> BaseModel:
        return self.local.delete(name, models.PointIdsList.model_validate_json(body))

    def count(self, name: str, body: bytes) -> BaseModel:
        return self.local.count(name, exact=bool(models.CountRequest.model_validate_json(body).exact))

    def query(self, name: str, body: bytes) -> object:
        asked = models.QueryRequestBatch.model_validate_json(body).searches
        self.parameters += [one.params for one in asked if one.params is not None]
        rounded = [one.model_copy(update={"query": _rounded(one.query), "params": None}) for one in asked]
        return [answer.model_dump(mode="json") for answer in self.local.query_batch_points(name, rounded)]

    def list_aliases(self, body: bytes) -> BaseModel:
        return self.local.get_aliases()

    def change_aliases(self, body: bytes) -> bool:
        return self.local.update_collection_aliases(models.ChangeAliasesOperation.model_validate_json(body).actions)


_ROUTES: dict[str, Callable[..., object]] = {
    "GET /aliases": QdrantServer.list_aliases,
    "POST /collections/aliases": QdrantServer.change_aliases,
    "GET /collections/([^/]+)/exists": QdrantServer.exists,
    "GET /collections/([^/]+)": QdrantServer.describe,
    "PUT /collections/([^/]+)": QdrantServer.create,
    "PATCH /collections/([^/]+)": QdrantServer.update,
    "DELETE /collections/([^/]+)": QdrantServer.delete,
    "PUT /collections/([^/]+)/index": QdrantServer.index,
    "PUT /collections/([^/]+)/points": QdrantServer.upsert,
    "POST /collections/([^/]+)/points/delete": QdrantServer.remove,
    "POST /collections/([^/]+)/points/count": QdrantServer.count,
    "POST /collections/([^/]+)/points/query/batch": QdrantServer.query,
}


def _rounded(query: object) -> list[float]:
    assert isinstance(query, models.NearestQuery)
    return np.array(query.nearest, np.float16).astype(float).tolist()


@contextmanager
def qdrant() -> Iterator[QdrantServer]:
    """Yields a fresh server until the block ends."""
    server, lock = QdrantServer(), threading.Lock()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            body = self.body()
            if server.away:
                return
            with lock:
                status, answer = self._find(self.path.partition("?")[0], body)
            content = answer.model_dump_json() if isinstance(answer, BaseModel) else json.dumps(answer)
            self.answer(status, f'{{"result":{content},"status":"ok","time":0.0}}'.encode())

        do_PUT = do_POST = do_PATCH = do_DELETE = do_GET

        def _find(self, path: str, body: bytes) -> tuple[int, Any]:
            if server.key is not None and self.headers.get("api-key") != server.key:
                return 401, None
            if (status := server.refuse(self.command, path)) is not None:
                return status, None
            server.asked[f"{self.command} {path.rpartition('/')[2]}"] += 1
            try:
                return 200, server.answer(self.command, path, body)
            except ValueError as error:  # raised by local mode if there is no such collection
                return (404 if "not found" in str(error) else 400), None

    with serving_http(Handler) as server.port:
        yield server
