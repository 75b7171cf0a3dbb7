"""Routes beside search: /admin, /livez, /readyz, /metrics, and /v1/collection with the texts of the search page."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field, RootModel, StringConstraints, ValidationError

from indexer.store.filters import Filter
from models.errors import did_you_mean
from models.fusion import Mode
from service.errors import InvalidRequest, ShuttingDown, invalid_request
from service.http.asgi import KEY, errors, read_body, runtime_of
from service.http.middleware import ACT
from service.serving.serving import Serving, count_facets, number_ranges

if TYPE_CHECKING:
    from service.runtime import Runtime

logger = logging.getLogger(__name__)

PAGE_FILE = "page.json"
SAMPLES = 4
SAMPLE_CHARACTERS = 40
MAX_QUESTIONS = 16

Words = Annotated[str, StringConstraints(max_length=1000)]

admin = APIRouter(prefix="/admin", tags=["admin"])
health = APIRouter(tags=["health"])
collection = APIRouter(prefix="/v1", tags=["search"])


async def _require_only(request: Request, *names: str) -> None:
    """Refuses unknown parameters and bodies: if they were ignored, the wrong version might be served."""
    given = [name for name, _ in request.query_params.multi_items()]
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise InvalidRequest(twice, "is given twice; give it once")
    if empty := next((name for name, value in request.query_params.items() if not value), None):
        raise InvalidRequest(empty, "is empty; give it a value, or leave it out")
    for name in set(given) - set(names):
        raise InvalidRequest(name, f"no such parameter{did_you_mean(name, names)}; /docs lists what this route takes")
    body = await read_body(request.scope, request.receive, runtime_of(request).settings.max_body_bytes)
    if body.strip() not in (b"", b"{}"):
        raise InvalidRequest("body", "is not read; name a version in the URL: /admin/rollback?version=…")


class SwapAnswer(BaseModel):
    """What is served after an administrator's request, and whether that is new."""

    snapshot: str
    changed: bool


class VersionsAnswer(BaseModel):
    """The versions of the collection, oldest first."""

    versions: list[str]
    current: str | None = Field(description="The version that the pointer names.")
    serving: str | None = Field(description="The version that this process answers from.")
    failed: str | None = Field(None, description="Why the pointer's version is not served, where it is not.")


@admin.post("/reload", responses=errors(409, 422, 503))
async def reload(request: Request) -> SwapAnswer:
    """Serve what the pointer names, at once instead of at the next look."""
    await _require_only(request)
    servings = runtime_of(request).servings
    changed = await servings.reload()
    return SwapAnswer(snapshot=servings.current().version, changed=changed)


@admin.post("/rollback", responses=errors(409, 422, 503))
async def rollback(request: Request, version: str | None = None, force: bool = False) -> SwapAnswer:
    """Point to the version published before the current one, or to the one named, and serve it.

    A version that fails a canary of the collection is refused; `force` skips the canaries.
    """
    await _require_only(request, "version", "force")
    servings = runtime_of(request).servings
    request.scope[ACT] = {"version": version, "force": force}
    changed = await servings.rollback(version, force=force)
    return SwapAnswer(snapshot=servings.current().version, changed=changed)


@admin.get("/versions")
async def versions(request: Request) -> VersionsAnswer:
    """The versions on disk, the one that is published and the one that this process serves."""
    servings = runtime_of(request).servings
    known, current = await asyncio.to_thread(lambda: (servings.collection.versions(), servings.collection.current()))
    failed = servings.refusal_of(current)
    return VersionsAnswer(versions=known, current=current, serving=servings.serving, failed=failed)


class StatusAnswer(BaseModel):
    """A word on the state of the process."""

    status: str
    snapshot: str | None = None


# Monitors and load balancers ask by HEAD, too; FastAPI, unlike Starlette, does not add it to GET.
@health.head("/livez", include_in_schema=False)
@health.get("/livez")
async def livez() -> StatusAnswer:
    """The process runs."""
    return StatusAnswer(status="alive")


@health.head("/readyz", include_in_schema=False)
@health.get("/readyz", responses=errors(503))
async def readyz(request: Request) -> StatusAnswer:
    """A real query just went through the snapshot that is served."""
    runtime = runtime_of(request)
    if runtime.draining.is_set():
        raise ShuttingDown("the service is about to end; other instances answer")
    serving = runtime.servings.current()
    await runtime.searcher.probe(serving)
    return StatusAnswer(status="ready", snapshot=serving.version)


@health.head("/metrics", include_in_schema=False)
@health.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus metrics, of all workers together."""
    # In a thread: adding up the metrics of many processes takes a while.
    exposed = await asyncio.to_thread(runtime_of(request).metrics.expose)
    return Response(exposed, media_type=CONTENT_TYPE_LATEST)


class EncoderFacts(BaseModel):
    """The encoder that reads the queries."""

    name: str
    architecture: str
    dim: int
    max_length: int
    space: str
    variant: str
    fingerprint: str


class DocumentEncoderFacts(BaseModel):
    """The encoder that read the documents of the snapshot."""

    name: str = Field(description="Empty in snapshots that do not hold it.")
    variant: str
    fingerprint: str


class FreshFacts(BaseModel):
    """What was posted and deleted since the snapshot was built."""

    position: int = Field(description="How far the log was read.")
    documents: int = Field(description="Posted documents that are searched beside the snapshot.")
    changes: int = Field(description="Documents posted or deleted, repeats counted.")
    passages: int = Field(description="Passages posted, repeats counted.")
    limit: int = Field(description="How many passages are taken before a re-index.")


class NumberRange(BaseModel):
    """All values of a field lie between these; documents that were deleted or replaced since the build count, too."""

    min: int | float
    max: int | float


class PageWords(BaseModel):
    """What the search page says about a collection, in one language; what is left out has a general default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: Words = Field("", description="The headline of the start page.")
    intro: Words = Field("", description="The sentence below it.")
    hint: Words = Field("", description="The text in the empty search box.")
    questions: Annotated[list[Words], Field(max_length=MAX_QUESTIONS)] = Field(
        [], description="Questions to try; samples of the documents are offered if there are none."
    )
    disclaimer: Words = Field("", description="The sentence at the foot of the page.")
    fields: dict[str, Words] = Field({}, description="Names of metadata fields.")
    values: dict[str, dict[str, Words]] = Field({}, description="Names of their values, by field.")


class CollectionAnswer(BaseModel):
    """What is served: enough for a page to offer filters."""

    snapshot: str
    created: str
    documents: int
    passages: int
    fresh: FreshFacts
    encoder: EncoderFacts
    document_encoder: DocumentEncoderFacts
    modes: list[Mode]
    default_mode: Mode
    max_top_k: int
    max_queries: int
    fields: list[str] = Field(description="Metadata fields that a filter may name.")
    facets: dict[str, dict[str, int]] = Field(description="Documents per value, for fields of few values.")
    numbers: dict[str, NumberRange] = Field(description="Fields of numbers.")
    samples: list[str] = Field(description="Titles of a few documents.")
    page: dict[str, PageWords] = Field(description="What the collection's page.json says, by language.")


class Page(RootModel[dict[str, PageWords]]):
    """`page.json` of a collection, by language: `zh`, `en`."""


@collection.get("/collection", responses=errors(503))
async def get_collection(request: Request) -> CollectionAnswer:
    """What is served: counts, the encoder, and the values that filters may ask for."""
    runtime = runtime_of(request)
    return await asyncio.to_thread(_describe, runtime, runtime.servings.current(), request.scope[KEY].filters)


def _describe(runtime: Runtime, serving: Serving, filters: tuple[Filter, ...]) -> CollectionAnswer:
    settings, manifest, within = runtime.settings, serving.snapshot.manifest, serving.fix(filters)
    encoder, ranges = serving.encoder, number_ranges(serving, within)
    return CollectionAnswer(
        snapshot=serving.version,
        created=manifest.created.isoformat(),
        documents=serving.documents(within),
        passages=serving.passages(within),
        fresh=_fresh_facts(serving, within, settings.fresh_limit),
        encoder=EncoderFacts(
            name=runtime.embedder.model,
            variant=encoder.variant,
            fingerprint=encoder.fingerprint,
            **encoder.spec.model_dump(include={"architecture", "dim", "max_length", "space"}),
        ),
        document_encoder=DocumentEncoderFacts(**manifest.encoder.model_dump()),
        modes=list(Mode),
        default_mode=settings.default_mode,
        max_top_k=settings.max_top_k,
        max_queries=settings.max_queries,
        fields=serving.fields(within),
        facets=count_facets(serving, within),
        numbers={name: NumberRange(min=low, max=high) for name, (low, high) in ranges.items()},
        samples=sample_documents(serving, within),
        page={} if within else read_page(settings.collection),
    )


def _fresh_facts(serving: Serving, within: tuple[Filter, ...], limit: int) -> FreshFacts:
    """For a key with filters: of its own visible documents, because all other numbers count those of everybody."""
    overlay = serving.overlay
    if not within:
        position, documents = serving.cursor.position, len(overlay.rows)
        return FreshFacts(
            position=position, documents=documents, changes=overlay.changes, passages=overlay.posted, limit=limit
        )
    ids = [serving.overlay.document(row).id for row in overlay.chosen(within).tolist()]
    position = max((overlay.positions[each] for each in ids), default=0)
    passages = serving.fresh_passages(within)
    return FreshFacts(position=position, documents=len(ids), changes=len(ids), passages=passages, limit=limit)


def read_page(folder: Path) -> dict[str, PageWords]:
    """Reads the collection's `page.json`, if it has one. A file that cannot be used is logged and left out."""
    path = folder / PAGE_FILE
    try:
        return Page.model_validate_json(path.read_bytes()).root
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("%s is not shown: %s", path, error)
    except ValidationError as error:
        wrong = invalid_request(error, PageWords)
        logger.warning("%s is not shown: %s; docs/operations.md has an example", path, wrong)
    return {}


def sample_documents(serving: Serving, within: tuple[Filter, ...] = ()) -> list[str]:
    """Titles, or the beginnings of texts, of a few documents of the snapshot: queries to begin with."""
    documents = serving.snapshot.documents
    rows = np.flatnonzero(serving.rows(within)).tolist() if within else range(len(documents))
    chosen = {rows[len(rows) * place // SAMPLES] for place in range(SAMPLES)} if len(rows) else set()
    headlines = [documents.get(row).headline for row in sorted(chosen - serving.overlay.gone)]
    return list(dict.fromkeys(headline[:SAMPLE_CHARACTERS].rstrip("… ") for headline in headlines))
