"""POST /v1/embeddings, POST /v1/rerank and GET /v1/models: the encoder itself, for applications that bring their own
texts. The shapes are those of OpenAI, and of Cohere and Jina, so that their clients work."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray

from models.encoder.spec import Side
from service.api.common import JsonRoute, errors, runtime_of
from service.embed import shorten
from service.errors import InvalidRequest, NotFound
from service.line import Deadline
from service.reading import is_blank
from service.runtime import Runtime
from service.serving import Serving
from service.text_schemas import EmbeddingsRequest, EncodingFormat, ModelFacts, ModelsAnswer, RerankRequest

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
METHODS = ["POST"]
SCORE_DECIMALS = 6
# Vectors that are written before others get the event loop.
WRITTEN_TOGETHER = 32

router = APIRouter(prefix="/v1", tags=["texts"])


@router.get("/models", responses=errors(503))
async def list_models(request: Request) -> ModelsAnswer:
    """The one model that is served: the encoder that reads the queries."""
    return ModelsAnswer(data=[_facts(runtime_of(request))])


@router.get("/models/{model}", responses=errors(404, 422, 503))
async def get_model(request: Request, model: str) -> ModelFacts:
    """The model of this name."""
    runtime = runtime_of(request)
    _check_model(runtime, model)
    return _facts(runtime)


async def embed_texts(runtime: Runtime, serving: Serving, request: EmbeddingsRequest) -> bytes:
    """The answer to a request for embeddings."""
    _check_model(runtime, request.model)
    _check_texts("input", request.texts, runtime.settings.max_texts)
    spec = serving.encoder.spec
    if request.input_type not in spec.sides:
        raise InvalidRequest("input_type", f"this encoder reads only: {', '.join(spec.sides)}")
    dimensions = spec.dim if request.dimensions is None else request.dimensions
    if not 1 <= dimensions <= spec.dim:
        raise InvalidRequest("dimensions", f"must be between 1 and {spec.dim}")
    deadline = Deadline(None, runtime.settings.timeout_ms)
    embedded = await runtime.embedder.embed(serving, request.texts, request.input_type, deadline=deadline)
    vectors = np.ascontiguousarray(shorten(embedded.vectors, dimensions), "<f4")
    rest = orjson.dumps({"model": runtime.embedder.model, "usage": _usage(embedded.tokens)})[1:]
    return b'{"object":"list","data":[%b],%b' % (b",".join(await write_vectors(vectors, request.encoding_format)), rest)


async def rerank(runtime: Runtime, serving: Serving, request: RerankRequest) -> bytes:
    """The answer to a request for an order: by the cosine of query and document, both read by the served encoder."""
    _check_model(runtime, request.model)
    if is_blank(request.query):
        raise InvalidRequest("query", "must not be empty")
    texts = request.texts
    _check_texts("documents", texts, runtime.settings.max_texts)
    deadline = Deadline(None, runtime.settings.timeout_ms)
    query = await runtime.embedder.embed(serving, [request.query], Side.QUERY, deadline=deadline)
    side = serving.encoder.spec.document_side
    documents = await runtime.embedder.embed(serving, texts, side, deadline=deadline)
    scores = documents.vectors @ query.vectors[0]
    best = np.argsort(-scores, kind="stable")[: request.top_n].tolist()
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": round(float(scores[index]), SCORE_DECIMALS)} for index in best
    ]
    if request.return_documents:
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    usage = _usage(query.tokens + documents.tokens)
    return orjson.dumps({"model": runtime.embedder.model, "results": results, "usage": usage})


embeddings_route = JsonRoute(EmbeddingsRequest, embed_texts)
rerank_route = JsonRoute(RerankRequest, rerank)


async def write_vectors(vectors: NDArray[np.float32], encoding: EncodingFormat) -> list[bytes]:
    """The JSON of each vector, some at a time: a million numbers in one go would hold up everyone else."""
    written = []
    for index, vector in enumerate(vectors):
        if index % WRITTEN_TOGETHER == 0:
            await asyncio.sleep(0)
        shown: Any = vector
        if encoding is EncodingFormat.BASE64:
            shown = base64.b64encode(vector.tobytes()).decode("ascii")
        entry = {"object": "embedding", "index": index, "embedding": shown}
        written.append(orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY))
    return written


def _facts(runtime: Runtime) -> ModelFacts:
    created = runtime.servings.current().snapshot.manifest.created
    return ModelFacts(id=runtime.embedder.model, created=int(created.timestamp()))


def _check_model(runtime: Runtime, name: str | None) -> None:
    """Vectors of another model than the one asked for would be compared with its own, and mean nothing."""
    if name is not None and name != runtime.embedder.model:
        raise NotFound(f"this model is not served here; the one that is: {runtime.embedder.model}")


def _check_texts(field: str, texts: Sequence[str], most: int) -> None:
    if not 1 <= len(texts) <= most:
        raise InvalidRequest(field, f"must hold between 1 and {most} texts, got {len(texts)}")
    for number, text in enumerate(texts, start=1):
        if is_blank(text):
            raise InvalidRequest(field, f"text {number} must not be empty")


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
