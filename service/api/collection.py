"""GET /v1/collection: what is served, as a whole."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from service.api.common import errors, runtime_of
from service.engine.jobs import Mode
from service.fresh.facets import count_facets, number_ranges
from service.page import read_page, sample_documents
from service.schemas import CollectionAnswer, EncoderFacts, FreshFacts, NumberRange

router = APIRouter(prefix="/v1", tags=["search"])


@router.get("/collection", responses=errors(503))
async def get_collection(request: Request) -> CollectionAnswer:
    """What is served: counts, the encoder, and the values that filters may ask for."""
    runtime = runtime_of(request)
    serving = runtime.servings.current()
    ranges = await asyncio.to_thread(number_ranges, serving)
    manifest, spec, fresh = serving.snapshot.manifest, serving.encoder.spec, serving.fresh
    return CollectionAnswer(
        snapshot=serving.version,
        created=manifest.created.isoformat(),
        documents=serving.documents,
        passages=manifest.counts.passages if fresh is None else fresh.passages,
        fresh=FreshFacts(
            position=serving.cursor.position,
            documents=0 if fresh is None else len(fresh.rows),
            changes=0 if fresh is None else fresh.changes,
            passages=0 if fresh is None else fresh.posted,
            limit=runtime.settings.fresh_limit,
        ),
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
        fields=serving.fields,
        facets=serving.facets if fresh is None else await asyncio.to_thread(count_facets, serving),
        numbers={name: NumberRange(min=low, max=high) for name, (low, high) in ranges.items()},
        samples=await asyncio.to_thread(sample_documents, serving),
        page=await asyncio.to_thread(read_page, runtime.settings.collection),
    )
