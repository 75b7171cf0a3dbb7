"""GET /v1/documents/{id} and GET /v1/collection: what is served, one document at a time or as a whole."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from service.api.common import errors, runtime_of
from service.engine.protocol import Mode
from service.errors import NotFound
from service.schemas import CollectionAnswer, DocumentAnswer, EncoderFacts

router = APIRouter(prefix="/v1", tags=["search"])


@router.get(
    "/documents/{id:path}",
    response_model=None,
    responses={200: {"model": DocumentAnswer}, **errors(404, 422, 503)},
)
async def get_document(request: Request, id: str) -> Response:
    """The whole document with this id, from the snapshot that is served now."""
    serving = runtime_of(request).servings.current()
    row = serving.snapshot.documents.row_of(id)
    if row is None:
        raise NotFound("the collection has no document with this id")
    stored = serving.snapshot.documents.get(row)
    snapshot = orjson.dumps(serving.version)
    body = b'{%b,"text":%b,"snapshot":%b}' % (stored.json, stored.text_json, snapshot)
    return Response(body, media_type="application/json")


@router.get("/collection", responses=errors(503))
async def get_collection(request: Request) -> CollectionAnswer:
    """What is served: counts, the encoder, and the values that filters may ask for."""
    runtime = runtime_of(request)
    serving = runtime.servings.current()
    manifest, spec = serving.snapshot.manifest, serving.encoder.spec
    return CollectionAnswer(
        snapshot=serving.version,
        created=manifest.created.isoformat(),
        documents=manifest.counts.documents,
        passages=manifest.counts.passages,
        encoder=EncoderFacts(
            architecture=spec.architecture,
            dim=spec.dim,
            max_length=spec.max_length,
            space=spec.space,
            variant=serving.encoder.variant,
            fingerprint=serving.encoder.fingerprint,
        ),
        modes=list(Mode),
        default_mode=runtime.settings.default_mode,
        max_top_k=runtime.settings.max_top_k,
        max_queries=runtime.settings.max_queries,
        fields=serving.snapshot.metadata.fields,
        facets=serving.facets,
    )
