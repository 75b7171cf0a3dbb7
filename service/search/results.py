"""Writes a ranking as JSON: stored documents with scores, snippets, matching passages and explanations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from indexer.store import StoredDocument
from models.fusion import LATER_DENSE, LATER_LEXICAL, Fusion, fuse, query_weight
from service.engine.protocol import Evidence, Found, Mode, Options
from service.engine.ranking import documents_wanted, group
from service.search.request import HydeStatus, Part
from service.search.snippet import make_snippet, marked_terms
from service.serving.facets import count_values
from service.serving.serving import Serving

SCORE_DECIMALS = 6

Placing = tuple[int, float]
"""Rank, from 1, and score."""


@dataclass(frozen=True, slots=True)
class View:
    """What a result shows: hits from `offset` to `end`, their parts, passages and explanation, facets over all."""

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
class Account:
    """What a ranking is based on, by document row: its placing on each side, and its passages, best first.

    `weight` is the dense side's share in a fusion by scores.
    """

    dense: Mapping[int, Placing]
    lexical: Mapping[int, Placing]
    passages: Mapping[int, list[tuple[int, float]]]
    weight: float | None


def result_json(
    serving: Serving,
    found: Found,
    options: Options,
    view: View,
    query: str,
    truncated: bool,
    hyde: HydeStatus | None,
) -> bytes:
    """Writes `{"hits": […], "truncated": …}` of one query; `truncated` says that it was cut."""
    wanted = marked_terms(query) if Part.SNIPPET in view.parts else []
    account = None
    if view.needs_evidence and found.evidence is not None:
        account = account_for(serving, options, found.evidence)
    # The score that is shown is the score that is compared with min_score.
    scores = [round(score, SCORE_DECIMALS) for score in found.scores.tolist()]
    ranked = [
        each
        for each in zip(found.documents.tolist(), found.passages.tolist(), scores, strict=True)
        if view.min_score is None or each[2] >= view.min_score
    ]
    hits = [_hit_json(serving, *each, view, wanted, account) for each in ranked[view.offset : view.end]]
    more = b"" if hyde is None else b',"hyde":"%b"' % hyde.encode()
    if view.facets:
        more += b',"facets":' + orjson.dumps(count_values(serving, [document for document, *_ in ranked], view.facets))
    return b'{"hits":[%b],"truncated":%b%b}' % (b",".join(hits), b"true" if truncated else b"false", more)


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
    written = [b'"span":[%d,%d],"score":%b' % (*span, repr(round(score, SCORE_DECIMALS)).encode())]
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
    """Id, title and metadata as they are stored; rewritten only if one of them is not wanted."""
    if Part.TITLE in parts and Part.METADATA in parts:
        return stored.json
    fields = orjson.loads(b"{%b}" % stored.json)
    return orjson.dumps({name: value for name, value in fields.items() if name == "id" or name in parts})[1:-1]


def account_for(serving: Serving, options: Options, evidence: Evidence) -> Account:
    """Repeats the engine's ranking on the rows that it found, and keeps its intermediate steps."""
    wanted = documents_wanted(options)
    dense = group(serving, *evidence.dense, wanted, LATER_DENSE).best
    lexical = group(serving, *evidence.lexical, wanted, LATER_LEXICAL).best
    weight = None
    rows, scores = evidence.dense if options.mode is Mode.DENSE else evidence.lexical
    if options.mode is Mode.HYBRID:
        if options.fusion is Fusion.SCORES:
            weight = query_weight(dense.scores, lexical.scores) if options.weight is None else options.weight
        rows, scores = fuse(evidence.dense, evidence.lexical, options.fusion, weight)
    passages: dict[int, list[tuple[int, float]]] = {}
    documents = serving.documents_of(rows).tolist()
    for document, row, score in zip(documents, rows.tolist(), scores.tolist(), strict=True):
        passages.setdefault(document, []).append((row, score))
    return Account(_placings(dense), _placings(lexical), passages, weight)


def _placings(side: Found) -> dict[int, Placing]:
    scored = zip(side.documents.tolist(), side.scores.tolist(), strict=True)
    return {document: (rank, score) for rank, (document, score) in enumerate(scored, start=1)}
