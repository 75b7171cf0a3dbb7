"""A ranking as JSON: the stored documents of its rows, with scores, snippets and what stands behind them.

Knows nothing of requests or queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from indexer.store.documents import StoredDocument
from service.engine.protocol import Found, Options
from service.evidence import Account, account_for
from service.fresh.facets import count_values
from service.schemas import HydeStatus, Part
from service.serving import Serving
from service.snippet import make_snippet

SCORE_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class View:
    """What a result shows of a ranking: the parts of a hit, its passages, its explanation, and which hits at all.

    Hits are the ranking from `offset` to `end`; `facets` are counted over all of it.
    """

    parts: frozenset[Part]
    passages: int = 0
    explain: bool = False
    min_score: float | None = None
    offset: int = 0
    end: int | None = None
    facets: tuple[str, ...] = ()

    @property
    def needs_evidence(self) -> bool:
        return self.passages > 0 or self.explain


@dataclass(frozen=True, slots=True)
class Reading:
    """How the query was read: the terms that snippets mark, whether it was cut, and what HyDE made of it."""

    wanted: Sequence[str]
    truncated: bool
    hyde: HydeStatus | None = None


def result_json(serving: Serving, found: Found, options: Options, view: View, reading: Reading) -> bytes:
    """`{"hits": […], "truncated": …}` of one query."""
    account = None
    if view.needs_evidence and found.evidence is not None:
        account = account_for(serving, options, found.evidence)
    # The score that is shown is the score that is compared.
    scores = [round(score, SCORE_DECIMALS) for score in found.scores.tolist()]
    ranked = [
        each
        for each in zip(found.documents.tolist(), found.passages.tolist(), scores, strict=True)
        if view.min_score is None or each[2] >= view.min_score
    ]
    hits = [_hit_json(serving, *each, view, reading.wanted, account) for each in ranked[view.offset : view.end]]
    more = b"" if reading.hyde is None else b',"hyde":"%b"' % reading.hyde.encode()
    if view.facets:
        more += b',"facets":' + orjson.dumps(count_values(serving, [document for document, *_ in ranked], view.facets))
    return b'{"hits":[%b],"truncated":%b%b}' % (b",".join(hits), b"true" if reading.truncated else b"false", more)


def _hit_json(
    serving: Serving,
    document: int,
    passage: int,
    score: float,
    view: View,
    wanted: Sequence[str],
    account: Account | None,
) -> bytes:
    stored = serving.document(document)
    written = [b'"score":%b' % repr(score).encode(), _stored_json(stored, view.parts)]
    if Part.SNIPPET in view.parts:
        written.append(_snippet_json(serving, stored, passage, wanted))
    if Part.TEXT in view.parts:
        written.append(b'"text":' + stored.text_json)
    if Part.HEADLINE in view.parts:
        written.append(b'"headline":' + orjson.dumps(stored.headline))
    if account is not None and view.passages:
        found = account.passages.get(document, [])[: view.passages]
        passages = [_passage_json(serving, stored, *each, view.parts, wanted) for each in found]
        written.append(b'"passages":[%b]' % b",".join(passages))
    if account is not None and view.explain:
        written.append(_explanation_json(account, document))
    return b"{%b}" % b",".join(written)


def _passage_json(
    serving: Serving, stored: StoredDocument, row: int, score: float, parts: frozenset[Part], wanted: Sequence[str]
) -> bytes:
    span = serving.span(row)
    shown = repr(round(score, SCORE_DECIMALS)).encode()
    written = [b'"span":[%d,%d],"score":%b' % (*span, shown)]
    if Part.SNIPPET in parts:
        written.append(_snippet_json(serving, stored, row, wanted))
    if Part.TEXT in parts:
        written.append(b'"text":' + orjson.dumps(stored.text[slice(*span)]))
    return b"{%b}" % b",".join(written)


def _snippet_json(serving: Serving, stored: StoredDocument, passage: int, wanted: Sequence[str]) -> bytes:
    snippet = make_snippet(stored.text, serving.span(passage), wanted)
    return b'"snippet":%b,"highlights":%b' % (orjson.dumps(snippet.text), orjson.dumps(snippet.highlights))


def _explanation_json(account: Account, document: int) -> bytes:
    sides = {"dense": account.dense.get(document), "lexical": account.lexical.get(document)}
    facts: dict[str, object] = {
        name: None if placing is None else {"rank": placing[0], "score": round(placing[1], SCORE_DECIMALS)}
        for name, placing in sides.items()
    }
    facts["weight"] = None if account.weight is None else round(account.weight, SCORE_DECIMALS)
    return b'"explain":' + orjson.dumps(facts)


def _stored_json(stored: StoredDocument, parts: frozenset[Part]) -> bytes:
    """Id, title and metadata as they are stored; parsed and written again only where one of them is not wanted."""
    if Part.TITLE in parts and Part.METADATA in parts:
        return stored.json
    fields = orjson.loads(b"{%b}" % stored.json)
    return orjson.dumps({name: value for name, value in fields.items() if name == "id" or name in parts})[1:-1]
