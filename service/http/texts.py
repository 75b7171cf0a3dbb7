"""Routes for the caller's own texts: POST /v1/embeddings, POST /v1/rerank and GET /v1/models.

The shapes are those of OpenAI, and of Cohere and Jina. Fields that their clients send without effect here are accepted.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from indexer.store.documents import is_blank
from models.encoder.spec import Side
from service.engine.queue import ONLINE_JOBS
from service.errors import InvalidRequest, NotFound
from service.http.asgi import JsonRoute, errors, runtime_of
from service.search.embedder import shorten
from service.search.portions import Deadline
from service.search.results import relevance

if TYPE_CHECKING:
    from service.runtime import Runtime
    from service.serving.serving import Serving

EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
METHODS = ["POST"]
SCORE_DECIMALS = 6
WRITTEN_TOGETHER = 32  # vectors that are written before other requests get the event loop

router = APIRouter(prefix="/v1", tags=["texts"])


class EncodingFormat(StrEnum):
    """Numbers, or the little-endian 32-bit floats themselves, which a client reads without parsing."""

    FLOAT = "float"
    BASE64 = "base64"


# Of a float32 of a unit vector, written out or in base64.
BYTES_A_NUMBER = {EncodingFormat.FLOAT: 12.5, EncodingFormat.BASE64: 16 / 3}


def _refuse_tokens(given: Any) -> Any:  # noqa: ANN401 (whatever a client sent)
    if isinstance(given, list) and any(isinstance(each, int | list) for each in given):
        raise ValueError("token arrays are not read, since tokens of another model mean nothing here; send texts")
    return given


class EmbeddingsRequest(BaseModel):
    """One text or several that want their embeddings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Annotated[str | Annotated[list[str], Field(fail_fast=True)], BeforeValidator(_refuse_tokens)] = Field(
        description="A text, or a list of texts whose embeddings come in their order. Long texts are cut."
    )
    model: str | None = Field(None, description="The model that /v1/models names, or nothing.")
    input_type: Side = Field(
        Side.QUERY, description="What the texts are; document only where the service's encoder reads documents too."
    )
    dimensions: int | None = Field(None, description="How many of the first dimensions to keep, normed again.")
    encoding_format: EncodingFormat = EncodingFormat.FLOAT
    user: str | None = Field(None, description="Taken and ignored.")

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else self.input


class Embedding(BaseModel):
    """The unit vector of one text: numbers or base64, as asked."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that the encoder read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """One embedding per text, in the order given."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelFacts(BaseModel):
    """A model that the service runs."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="When the snapshot that it serves was built, in seconds since 1970.")
    owned_by: str = "care-search"


class ModelsAnswer(BaseModel):
    """The models that the service runs: an encoder, and perhaps a reranker."""

    object: Literal["list"] = "list"
    data: list[ModelFacts]


class RerankDocument(BaseModel):
    """A document as an object; what it holds beside its text is ignored."""

    model_config = ConfigDict(frozen=True)

    text: str


class RerankRequest(BaseModel):
    """A query, and documents to be put into order by how well they answer it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    query: str
    documents: Annotated[list[str | RerankDocument], Field(fail_fast=True)] = Field(
        description="Texts, or objects with a text. Long texts are cut."
    )
    model: str | None = Field(None, description="The model that /v1/models names, or nothing.")
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="How many of the best to give back.")
    return_documents: bool = Field(False, description="Whether the results hold the documents' texts.")

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class RerankResult(BaseModel):
    """A document by its place in the request, and its score."""

    index: int
    relevance_score: float = Field(
        description="By the reranker, between 0 and 1; without one, the cosine of query and document."
    )
    document: RerankDocument | None = None


class RerankAnswer(BaseModel):
    """The documents, best first."""

    model: str
    results: list[RerankResult]
    usage: Usage


@router.get("/models", responses=errors(503))
async def list_models(request: Request) -> ModelsAnswer:
    """The models that are served: the encoder that reads the queries, and the reranker if there is one."""
    runtime = runtime_of(request)
    return ModelsAnswer(data=[_facts(runtime, name) for name in _models(runtime)])


@router.get("/models/{model}", responses=errors(404, 422, 503))
async def get_model(request: Request, model: str) -> ModelFacts:
    """The model of this name."""
    runtime = runtime_of(request)
    _check_model(model, _models(runtime))
    return _facts(runtime, model)


async def embed_texts(runtime: Runtime, serving: Serving, request: EmbeddingsRequest, tenant: bytes = b"") -> bytes:
    """Answers a request for embeddings."""
    _check_model(request.model, [runtime.embedder.model])
    _check_texts("input", request.texts, runtime.settings.max_texts, alone=isinstance(request.input, str))
    spec = serving.encoder.spec
    if request.input_type not in spec.sides:
        raise InvalidRequest("input_type", f"this encoder reads only: {', '.join(spec.sides)}")
    dimensions = spec.dim if request.dimensions is None else request.dimensions
    if not 1 <= dimensions <= spec.dim:
        raise InvalidRequest("dimensions", f"must be between 1 and {spec.dim}")
    size = int(len(request.texts) * dimensions * BYTES_A_NUMBER[request.encoding_format])
    if size > (most := runtime.settings.max_answer_bytes):
        raise InvalidRequest("input", f"the answer would have about {size} bytes, {most} are allowed; send fewer texts")
    deadline = Deadline(None, runtime.settings.timeout_ms)
    embedded = await runtime.embedder.embed(
        serving, request.texts, request.input_type, deadline=deadline, tenant=tenant
    )
    vectors = np.ascontiguousarray(shorten(embedded.vectors, dimensions), "<f4")
    rest = orjson.dumps({"model": runtime.embedder.model, "usage": _usage(embedded.tokens)})[1:]
    return b'{"object":"list","data":[%b],%b' % (b",".join(await write_vectors(vectors, request.encoding_format)), rest)


async def rerank(runtime: Runtime, serving: Serving, request: RerankRequest, tenant: bytes = b"") -> bytes:
    """Orders documents by the reranker, or without one by the cosine of their embeddings and the query's."""
    reranker = runtime.searcher.reranker
    _check_model(request.model, _models(runtime))
    if is_blank(request.query):
        raise InvalidRequest("query", "must not be empty")
    texts = request.texts
    _check_texts("documents", texts, runtime.settings.max_texts)
    deadline = Deadline(None, runtime.settings.timeout_ms)
    shown: Sequence[float | None]
    if reranker is not None and request.model != runtime.embedder.model:
        bulk = len(texts) > ONLINE_JOBS
        scored = await reranker.score(serving, request.query, texts, deadline=deadline, bulk=bulk)
        model, scores, tokens, shown = reranker.model, scored.scores, scored.tokens, relevance(scored.scores)
    else:
        embed = runtime.embedder.embed
        query = await embed(serving, [request.query], Side.QUERY, deadline=deadline, tenant=tenant)
        side = serving.encoder.spec.document_side
        documents = await embed(serving, texts, side, deadline=deadline, tenant=tenant)
        scores = documents.vectors @ query.vectors[0]
        model, tokens = runtime.embedder.model, query.tokens + documents.tokens
        shown = [round(score, SCORE_DECIMALS) for score in scores.tolist()]
    best = np.argsort(-scores, kind="stable")[: request.top_n].tolist()
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": shown[index]} for index in best]
    if request.return_documents:
        results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
    return orjson.dumps({"model": model, "results": results, "usage": _usage(tokens)})


embeddings_route = JsonRoute(EmbeddingsRequest, embed_texts)
rerank_route = JsonRoute(RerankRequest, rerank)


async def write_vectors(vectors: NDArray[np.float32], encoding: EncodingFormat) -> list[bytes]:
    """Writes each vector as JSON, some at a time: a million numbers at once would block other requests."""
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


def _facts(runtime: Runtime, name: str) -> ModelFacts:
    created = runtime.servings.current().snapshot.manifest.created
    return ModelFacts(id=name, created=int(created.timestamp()))


def _models(runtime: Runtime) -> list[str]:
    reranker = runtime.searcher.reranker
    return [runtime.embedder.model, *([] if reranker is None else [reranker.model])]


def _check_model(name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise NotFound(f"this model is not served here; the one that is: {' or '.join(known)}")


def _check_texts(field: str, texts: Sequence[str], most: int, *, alone: bool = False) -> None:
    if not 1 <= len(texts) <= most:
        raise InvalidRequest(field, f"must hold between 1 and {most} texts, got {len(texts)}")
    for number, text in enumerate(texts):
        if is_blank(text):
            raise InvalidRequest(field if alone else f"{field}[{number}]", "must not be empty")


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
