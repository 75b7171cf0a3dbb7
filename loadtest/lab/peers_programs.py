"""Programs that `make bench-peers` runs in each peer's own environment.

  python -m loadtest.lab.peers_programs txtai VECTORS IDS WEIGHTS TARGET       builds txtai's index from given vectors
  python -m loadtest.lab.peers_programs infinity WEIGHTS VECTORS INDEX IDS PORT    serves Infinity with FAISS

txtai's index is its own choice for this number of vectors (`IVF…,Flat`), without its document store: to answer ids and
scores only is the least work for it. Infinity's engine is called in the process that answers, and FAISS in the event
loop right after it: no second HTTP hop, no vectors as JSON, no middleware.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

TOP_K = 10
# As our own index is searched.
EF_SEARCH = 64


def build_txtai(vectors: str, ids: str, weights: str, target: str) -> None:
    from txtai import Embeddings

    names = json.loads(Path(ids).read_text(encoding="utf-8"))
    values = np.load(vectors, mmap_mode="r").astype(np.float32)
    embeddings = Embeddings({"method": "external", "content": False, "format": "json"})
    embeddings.index((name, value, None) for name, value in zip(names, values, strict=True))
    # From here on vectors come from the encoder.
    embeddings.config |= {"method": "clspooling", "path": weights, "maxlength": 512}
    embeddings.save(target)
    print(f"txtai indexed {embeddings.count()} vectors: {embeddings.config['build']}")


def serve_infinity(weights: str, vectors: str, graph: str, ids: str, port: str) -> None:
    import orjson
    import uvicorn
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    index, names = open_index(Path(vectors), Path(graph)), json.loads(Path(ids).read_text(encoding="utf-8"))
    plain = {"bettertransformer": False, "compile": False, "trust_remote_code": False}
    arguments = EngineArgs(model_name_or_path=weights, engine="torch", device="cpu", dtype="float32", **plain)
    engine = AsyncEmbeddingEngine.from_args(arguments)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await engine.astart()
        yield
        await engine.astop()

    async def search(request: Request) -> Response:
        query = orjson.loads(await request.body())["query"]
        encoded, _ = await engine.embed(sentences=[query])
        scores, rows = index.search(np.asarray(encoded, dtype=np.float32), TOP_K)
        found = zip(rows[0].tolist(), scores[0].tolist(), strict=True)
        hits = [{"id": names[row], "score": score} for row, score in found]
        return Response(orjson.dumps({"results": [{"hits": hits}]}), media_type="application/json")

    async def ready(request: Request) -> Response:
        return Response()

    routes = [Route("/v1/search", search, methods=["POST"]), Route("/readyz", ready)]
    app = Starlette(routes=routes, lifespan=lifespan)
    uvicorn.run(app, host="127.0.0.1", port=int(port), loop="uvloop", http="httptools", access_log=False)


def open_index(vectors: Path, graph: Path) -> Any:  # noqa: ANN401 - what read_index gives has no type of its own
    """Opens our index file, which holds only the graph's links, and loads the vectors beside it into memory."""
    import faiss

    index: Any = faiss.read_index(str(graph))
    storage = faiss.IndexFlatIP(index.d)
    storage.add(np.load(vectors).astype(np.float32))
    index.storage = storage
    index.own_fields = False
    index.referenced_objects = [storage]
    faiss.ParameterSpace().set_index_parameter(index, "efSearch", EF_SEARCH)
    return index


if __name__ == "__main__":
    if sys.argv[1] == "txtai":
        build_txtai(*sys.argv[2:])
    else:
        serve_infinity(*sys.argv[2:])
