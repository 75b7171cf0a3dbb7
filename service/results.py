"""A ranking as JSON: the stored documents of its rows, with scores and snippets. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from indexer.store import StoredDocument
from service.engine.protocol import Found
from service.schemas import Part
from service.serving import Serving
from service.snippet import make_snippet

SCORE_DECIMALS = 6


def result_json(
    serving: Serving, found: Found, parts: frozenset[Part], wanted: Sequence[str], *, truncated: bool
) -> bytes:
    """`{"hits": […], "truncated": …}` of one query; `wanted` are the terms that its snippets mark."""
    hits = [
        _hit_json(serving, document, passage, score, parts, wanted)
        for document, passage, score in zip(
            found.documents.tolist(), found.passages.tolist(), found.scores.tolist(), strict=True
        )
    ]
    return b'{"hits":[%b],"truncated":%b}' % (b",".join(hits), b"true" if truncated else b"false")


def _hit_json(
    serving: Serving, document: int, passage: int, score: float, parts: frozenset[Part], wanted: Sequence[str]
) -> bytes:
    stored = serving.snapshot.documents.get(document)
    written = [b'"score":%b' % repr(round(score, SCORE_DECIMALS)).encode(), _stored_json(stored, parts)]
    if Part.SNIPPET in parts:
        snippet = make_snippet(stored.text, serving.snapshot.passages.span(passage), wanted)
        written.append(b'"snippet":%b,"highlights":%b' % (orjson.dumps(snippet.text), orjson.dumps(snippet.highlights)))
    if Part.TEXT in parts:
        written.append(b'"text":' + stored.text_json)
    return b"{%b}" % b",".join(written)


def _stored_json(stored: StoredDocument, parts: frozenset[Part]) -> bytes:
    """Id, title and metadata as they are stored; parsed and written again only where one of them is not wanted."""
    if Part.TITLE in parts and Part.METADATA in parts:
        return stored.json
    fields = orjson.loads(b"{%b}" % stored.json)
    return orjson.dumps({name: value for name, value in fields.items() if name == "id" or name in parts})[1:-1]
