"""Infinity with an in-memory FAISS search, as one server for `make bench-peers`. Runs in Infinity's own environment.

  python -m loadtest.lab.peers_infinity WEIGHTS VECTORS INDEX IDS PORT

Infinity's engine is called in the process that answers, and FAISS in the event loop right after it: no second HTTP
hop, no vectors as JSON, no middleware. Search included, it takes no more processor time than Infinity's own server
takes without one. Its answer is ids and scores.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import orjson
import uvicorn
from infinity_emb import AsyncEmbeddingEngine, EngineArgs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TOP_K = 10
# As our own index is searched.
EF_SEARCH = 64


def create_app(weights: Path, index: faiss.Index, ids: list[str]) -> Starlette:
    arguments = EngineArgs(
        model_name_or_path=str(weights),
        engine="torch",
        device="cpu",
        dtype="float32",
        bettertransformer=False,
        compile=False,
        trust_remote_code=False,
    )
    engine = AsyncEmbeddingEngine.from_args(arguments)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.astart()
        yield
        await engine.astop()

    async def search(request: Request) -> Response:
        query = orjson.loads(await request.body())["query"]
        vectors, _ = await engine.embed(sentences=[query])
        scores, rows = index.search(np.asarray(vectors, dtype=np.float32), TOP_K)
        hits = [
            {"id": ids[row], "score": score} for row, score in zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        ]
        return Response(orjson.dumps({"results": [{"hits": hits}]}), media_type="application/json")

    async def ready(request: Request) -> Response:
        return Response()

    routes = [Route("/v1/search", search, methods=["POST"]), Route("/readyz", ready)]
    return Starlette(routes=routes, lifespan=lifespan)


def open_index(vectors: Path, graph: Path) -> Any:  # noqa: ANN401 - what read_index gives has no type of its own
    """Our file holds the links of the graph alone; the vectors are beside it, and lie in memory here."""
    index: Any = faiss.read_index(str(graph))
    storage = faiss.IndexFlatIP(index.d)
    storage.add(np.load(vectors).astype(np.float32))
    index.storage = storage
    index.own_fields = False
    index.referenced_objects = [storage]
    faiss.ParameterSpace().set_index_parameter(index, "efSearch", EF_SEARCH)
    return index


def main(weights: str, vectors: str, index: str, ids: str, port: str) -> None:
    loaded = open_index(Path(vectors), Path(index))
    names = json.loads(Path(ids).read_text(encoding="utf-8"))
    app = create_app(Path(weights), loaded, names)
    uvicorn.run(app, host="127.0.0.1", port=int(port), loop="uvloop", http="httptools", access_log=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
