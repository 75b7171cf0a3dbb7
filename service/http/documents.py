"""Routes of /v1/documents: read a document by its id, and add, replace and delete documents between two builds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Self
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StringConstraints, model_validator

from indexer.errors import BadValue
from indexer.store.documents import id_fault, is_blank
from indexer.store.filters import Filter, as_value, fields_of, require_name
from indexer.store.fresh_log import NewDocument
from indexer.store.metadata import admits
from service.errors import FreshLimit, InvalidRequest, NotFound
from service.http.asgi import KEY, errors, parse_body, read_body, runtime_of
from service.http.middleware import ACT
from service.updates.writer import ChangesAnswer

PATH = "/v1/documents"
SHOWN_IDS = 100  # in one line of the audit log
Id = Annotated[str, StringConstraints(min_length=1)] | StrictInt

router = APIRouter(prefix="/v1", tags=["documents"])


class DocumentAnswer(BaseModel):
    """A whole document."""

    id: str
    title: str
    metadata: dict[str, Any]
    text: str
    snapshot: str


class PostedDocument(BaseModel):
    """A document, by the rules of a corpus: it has an id, under either name, and a text or a title."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"oneOf": [{"required": ["id"]}, {"required": ["_id"]}]}
    )

    id: Id | None = Field(None, description="The caller's name for it; a document with the same id is replaced.")
    corpus_id: Id | None = Field(None, alias="_id", description="The id under the name that corpora give it.")
    title: str | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = Field(
        None, description="Texts, numbers, true or false, lists of texts; a field holds one kind in all documents."
    )

    @model_validator(mode="after")
    def _one_id(self) -> Self:
        if (self.id is None) == (self.corpus_id is None):
            raise ValueError("give an id, under one of the names id and _id")
        return self

    @property
    def name(self) -> str:
        """The id, under either name."""
        return str(self.corpus_id if self.id is None else self.id)


class DocumentsRequest(BaseModel):
    """Documents to add or replace: all of them, or none where one is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: Annotated[list[PostedDocument], Field(fail_fast=True)]


@router.get(
    "/documents/{id:path}", response_model=None, responses={200: {"model": DocumentAnswer}, **errors(404, 422, 503)}
)
async def get_document(request: Request, id: str) -> Response:
    """The whole document with this id, as it is served now."""
    _require_id(request, id)
    serving = runtime_of(request).servings.current()
    row = serving.row_within(id, serving.fix(request.scope[KEY].filters))
    if row is None:
        raise NotFound("the collection has no document with this id")
    stored = serving.overlay.document(row)
    body = b'{%b,"text":%b,"snapshot":%b}' % (stored.json, stored.text_json, orjson.dumps(serving.version))
    return Response(body, media_type="application/json")


# Documented in openapi.py: the body is read here, within the limit of its size, and not by FastAPI.
@router.post("/documents", include_in_schema=False)
async def post_documents(request: Request) -> ChangesAnswer:
    """Adds documents, or replaces those of the same id."""
    runtime = runtime_of(request)
    body = await read_body(request.scope, request.receive, runtime.settings.max_body_bytes)
    most = runtime.settings.max_texts
    posted = parse_body(DocumentsRequest, body, most).documents
    if not 1 <= len(posted) <= most:
        raise InvalidRequest("documents", f"must hold between 1 and {most} documents, got {len(posted)}")
    documents = [_checked(number, document) for number, document in enumerate(posted)]
    within = request.scope[KEY].filters
    if within:
        await asyncio.to_thread(_require_within, documents, within)
    ids = [document.id for document in documents]
    request.scope[ACT] = {"documents": len(ids), "ids": ids[:SHOWN_IDS]}
    try:
        return await runtime.writer.post(documents, within)
    except FreshLimit:
        if not within:
            raise
        # The numbers in the message count the documents of everybody.
        raise FreshLimit("too many passages were posted since the last build: re-index") from None


@router.delete("/documents/{id:path}", responses=errors(422, 503))
async def delete_document(request: Request, id: str) -> ChangesAnswer:
    """Takes the document with this id out of all answers; `changed` is 0 where there is none."""
    _require_id(request, id)
    runtime, filters = runtime_of(request), request.scope[KEY].filters
    if fault := id_fault(id):
        serving = runtime.servings.current()
        # A snapshot of an earlier release may have such ids. No other can, so there is nothing to log.
        if serving.row_within(id, serving.fix(filters)) is None:
            raise InvalidRequest("id", f"{fault}, so it is no document's; give the id of one")
    request.scope[ACT] = {"ids": [id]}
    return await runtime.writer.delete(id, filters)


def _require_id(request: Request, id: str) -> None:
    """Refuses an id that was read differently than it was sent.

    The router's patterns stop at a line break, and the server replaces what is not UTF-8, which may give another id.
    """
    if not id or request.scope["path"] != f"{PATH}/{id}":
        raise InvalidRequest("id", "give the document's id after the last slash; it has no control characters")
    try:
        unquote_to_bytes(request.scope["raw_path"]).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("id", "is not UTF-8; convert it, then escape it") from None


def _require_within(documents: Sequence[NewDocument], within: tuple[Filter, ...]) -> None:
    """Refuses a list if one of its values alone fails the key's filters: other keys would see the document."""
    fields = fields_of(within)
    for number, document in enumerate(documents):
        ruled = {name: value for name, value in document.metadata.items() if name in fields}
        lists = {name: value for name, value in ruled.items() if isinstance(value, list)}
        parts = [ruled | {name: [each]} for name, values in lists.items() for each in set(values)]
        if not admits(within, ruled, *parts):
            reason = "must satisfy the filter of this key; of a list, each value must"
            raise InvalidRequest(f"documents[{number}].metadata", reason)


def _checked(number: int, posted: PostedDocument) -> NewDocument:
    """Checks a document by the rules of a corpus."""
    title, text = posted.title or "", posted.text or ""
    if is_blank(title) and is_blank(text):
        raise InvalidRequest(f"documents[{number}]", "has neither text nor title")
    if fault := id_fault(posted.name):
        raise InvalidRequest(f"documents[{number}]", f"its id {fault}")
    try:
        for name in posted.metadata or {}:
            require_name(name)
        metadata = {name: as_value(name, value) for name, value in (posted.metadata or {}).items()}
    except BadValue as bad:
        raise InvalidRequest(f"documents[{number}].metadata", str(bad)) from None
    return NewDocument(posted.name, title, text, metadata)
