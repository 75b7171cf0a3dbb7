"""/v1/documents: a document by its id, and documents in and out between two builds of the index."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Depends, Request, Response

from indexer.errors import BadValue
from indexer.store.filters import as_value
from service.api.admin import require_admin
from service.api.common import errors, parse_body, runtime_of
from service.document_schemas import ChangesAnswer, DocumentAnswer, DocumentsRequest, PostedDocument
from service.errors import InvalidRequest, NotFound
from service.fresh.encode import NewDocument
from service.fresh.write import Receipt
from service.http import read_body
from service.reading import is_blank

PATH = "/v1/documents"

router = APIRouter(prefix="/v1", tags=["documents"])


@router.get(
    "/documents/{id:path}",
    response_model=None,
    responses={200: {"model": DocumentAnswer}, **errors(404, 422, 503)},
)
async def get_document(request: Request, id: str) -> Response:
    """The whole document with this id, as it is served now."""
    serving = runtime_of(request).servings.current()
    row = serving.row_of(id)
    if row is None:
        raise NotFound("the collection has no document with this id")
    stored = serving.document(row)
    snapshot = orjson.dumps(serving.version)
    body = b'{%b,"text":%b,"snapshot":%b}' % (stored.json, stored.text_json, snapshot)
    return Response(body, media_type="application/json")


# In the OpenAPI document by its models, as the lean routes are: the framework does not see the body.
@router.post("/documents", dependencies=[Depends(require_admin)], include_in_schema=False)
async def post_documents(request: Request) -> ChangesAnswer:
    """Adds documents, or replaces those of the same id."""
    runtime = runtime_of(request)
    body = await read_body(request.scope, request.receive, runtime.settings.max_body_bytes)
    parsed = parse_body(DocumentsRequest, body)
    if not 1 <= len(parsed.documents) <= runtime.settings.max_texts:
        most = runtime.settings.max_texts
        raise InvalidRequest("documents", f"must hold between 1 and {most} documents, got {len(parsed.documents)}")
    documents = [_checked(number, document) for number, document in enumerate(parsed.documents)]
    return _answer(await runtime.writer.post(documents))


@router.delete(
    "/documents/{id:path}",
    dependencies=[Depends(require_admin)],
    responses=errors(403, 422, 503),
)
async def delete_document(request: Request, id: str) -> ChangesAnswer:
    """Takes the document with this id out of all answers; `changed` is 0 where there is none."""
    return _answer(await runtime_of(request).writer.delete(id))


def _checked(number: int, posted: PostedDocument) -> NewDocument:
    """The document, by the rules of a corpus."""
    title, text = posted.title or "", posted.text or ""
    if not title.strip() and not text.strip():
        raise InvalidRequest(f"documents[{number}]", "has neither text nor title")
    if is_blank(posted.name):
        raise InvalidRequest(f"documents[{number}]", "has no id")
    try:
        metadata = {name: as_value(name, value) for name, value in (posted.metadata or {}).items()}
    except BadValue as bad:
        raise InvalidRequest(f"documents[{number}].metadata", str(bad)) from None
    return NewDocument(posted.name, title, text, metadata)


def _answer(receipt: Receipt) -> ChangesAnswer:
    return ChangesAnswer(position=receipt.position, changed=receipt.changed, snapshot=receipt.snapshot)
