"""Writes a ranking as JSON: stored documents with scores, snippets, matching passages and explanations."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from indexer.store.documents import StoredDocument
from models.fusion import Mode
from models.lexical import query_terms
from service.engine.jobs import Found, Options
from service.search.evidence import Account, account_for, divide_words, passage_texts
from service.search.request import HydeStatus, Part
from service.serving.serving import Serving, count_values

SCORE_DECIMALS = 6
WINDOW = 120  # characters of a Chinese snippet
LATIN_WINDOW = 240
MAX_TERMS = 64  # to mark: a page of text sent as a query must not block the event loop
LOCATED_TERMS = 16  # by which the passage to show is chosen
LONGEST_WORD = 20  # characters by which a cut inside a word moves, at most
ELLIPSIS = "…"
# Punctuation that a snippet never begins with.
NO_BEGINNING = frozenset("，。、；：！？）】》”’,.;:!?) \t\n\u3000")
# Snippets begin after the end of a sentence, or else of a clause. A full stop ends a sentence only before a space.
_SENTENCE = re.compile(r"[。！？\n]+[”’）」』\s]*|[.!?][\"')]*\s+")
_CLAUSE = re.compile(r"[；，：;,:]\s*")
# Words without a topic. A pair of Chinese characters that holds one of these particles is not a word.
_PARTICLES = frozenset("的了是与或也很就")
_SMALL_WORDS = frozenset(
    ["to", "of", "in", "on", "for", "and", "or", "with", "my", "it", "be", "at", "by", "from", "as"]
)

Range = tuple[int, int]
Match = tuple[int, int, str]


@dataclass(slots=True)
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
    terms = marked_terms(query) if Part.SNIPPET in view.parts else []
    account = None
    if view.needs_evidence and found.evidence is not None:
        words = divide_words(serving, found.evidence.lexical, found.documents.tolist(), query)
        account = account_for(serving, options, found.evidence, words)
    located = terms if options.mode is not Mode.DENSE else []
    # The score that is shown is the score that is compared with min_score.
    scores = [round(score, SCORE_DECIMALS) for score in found.scores.tolist()]
    second: Sequence[float | None]
    second = [None] * len(scores) if found.reranked is None else relevance(found.reranked.scores)
    ranked = [
        each
        for each in zip(found.documents.tolist(), found.passages.tolist(), scores, second, strict=True)
        if view.min_score is None or each[2] >= view.min_score
    ]
    hits = [
        _hit_json(serving, row, passage, score, other, view, terms, located, account)
        for row, passage, score, other in ranked[view.offset : view.end]
    ]
    more = b"" if hyde is None else b',"hyde":"%b"' % hyde.encode()
    if found.reranked is not None:
        more += b',"rerank":{"depth":%d,"scored":%d}' % (found.reranked.depth, found.reranked.scored)
    if view.facets:
        more += b',"facets":' + orjson.dumps(count_values(serving, [document for document, *_ in ranked], view.facets))
    return b'{"hits":[%b],"truncated":%b%b}' % (b",".join(hits), b"true" if truncated else b"false", more)


def relevance(scores: NDArray[np.float32]) -> list[float | None]:
    """Returns the reranker's scores between 0 and 1, None for those that are not there."""
    shown = np.round(1 / (1 + np.exp(-np.asarray(scores, np.float64))), SCORE_DECIMALS).tolist()
    return [None if math.isnan(score) else score for score in shown]


def passage_of(serving: Serving, document: int, text: str, passage: int, terms: Sequence[str]) -> int:
    """Returns the passage of a document that holds most of the terms; of equals `passage`, then the first.

    `text` is the document's, folded once: of a long one, that takes most of the time.
    """
    rows = serving.overlay.passages_of(document) if terms else ()
    if len(rows) < 2:
        return passage
    folded, terms = _fold(text), terms[:LOCATED_TERMS]

    def held(row: int) -> int:
        piece = folded[slice(*serving.overlay.span(row))]
        return [term in piece for term in terms].count(True)

    if held(passage) == len(terms):  # spares long documents the look at every passage
        return passage
    return max(rows, key=lambda row: (held(row), row == passage, -row))


def best_passages(serving: Serving, found: Sequence[tuple[int, int]], terms: Sequence[str]) -> list[str]:
    """Returns what a reranker reads of documents that were found, each with a passage: see `passage_of`."""
    texts = []
    for document, passage in found:
        stored = serving.overlay.document(document)
        best = passage_of(serving, document, stored.text, passage, terms)
        texts += passage_texts(serving, document, [best])
    return texts


def _hit_json(
    serving: Serving,
    document: int,
    passage: int,
    score: float,
    rerank_score: float | None,
    view: View,
    terms: Sequence[str],
    located: Sequence[str],
    account: Account | None,
) -> bytes:
    """Writes one hit; `terms` are marked in its snippets, and `located` choose the passage of the first one."""
    stored = serving.overlay.document(document)
    text = stored.text if Part.SNIPPET in view.parts or view.passages else ""  # parsed once, as it may be long
    written = [b'"score":%b' % repr(score).encode(), _stored_json(stored, view.parts)]
    if rerank_score is not None:
        written.insert(1, b'"rerank_score":%b' % repr(rerank_score).encode())
    if Part.SNIPPET in view.parts:
        shown = passage_of(serving, document, text, passage, located)
        written.append(_snippet_json(serving, text, shown, terms))
    if Part.TEXT in view.parts:
        written.append(b'"text":' + stored.text_json)
    if Part.HEADLINE in view.parts:
        written.append(b'"headline":' + orjson.dumps(stored.headline))
    if account is not None and view.passages:
        found = account.passages.get(document, [])[: view.passages]
        passages = [_passage_json(serving, text, *each, view.parts, terms) for each in found]
        written.append(b'"passages":[%b]' % b",".join(passages))
    if account is not None and view.explain:
        written.append(_explanation_json(account, document))
    return b"{%b}" % b",".join(written)


def _passage_json(
    serving: Serving, text: str, row: int, score: float, parts: frozenset[Part], terms: Sequence[str]
) -> bytes:
    span = serving.overlay.span(row)
    written = [b'"span":[%d,%d],"score":%b' % (*span, repr(round(score, SCORE_DECIMALS)).encode())]
    if Part.SNIPPET in parts:
        written.append(_snippet_json(serving, text, row, terms))
    if Part.TEXT in parts:
        written.append(b'"text":' + orjson.dumps(text[slice(*span)]))
    return b"{%b}" % b",".join(written)


def _snippet_json(serving: Serving, text: str, passage: int, terms: Sequence[str]) -> bytes:
    snippet = make_snippet(text, serving.overlay.span(passage), terms)
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


@dataclass(frozen=True, slots=True)
class Snippet:
    """`highlights` are sorted ranges of `text` in characters (code points) that do not touch."""

    text: str
    highlights: list[Range]


class _Folding(dict[int, str]):
    """Each character as the lexical index reads it, if that is again one character."""

    def __missing__(self, point: int) -> str:
        folded = unicodedata.normalize("NFKC", chr(point)).lower()
        self[point] = folded if len(folded) == 1 else chr(point)
        return self[point]


_FOLDING = _Folding()
# Raised, circled, compatible and full-width characters. Few texts have any, and folding every text would be slow.
_OTHER_SHAPES = re.compile("[²³¹\u2070-\u209f\u2460-\u24ff\uf900-\ufaff\uff10-\uff19\uff21-\uff3a\uff41-\uff5a]")


def marked_terms(query: str) -> list[str]:
    """Returns the terms to mark for a query, without question words, particles and, if possible, single characters."""
    distinct = [term for term in dict.fromkeys(query_terms(query)) if len(term) <= WINDOW]
    telling = [term for term in distinct if len(term) > 1 and term not in _SMALL_WORDS]
    return ([term for term in telling if not _PARTICLES.intersection(term)] or telling or distinct)[:MAX_TERMS]


def make_snippet(text: str, span: Range, terms: Sequence[str]) -> Snippet:
    """Cuts a window around the densest matches out of the passage `span` of a text."""
    passage = text[slice(*span)]
    matches = _find(_fold(passage), terms)
    # In UTF-8 a Chinese character takes three bytes, a Latin letter one.
    width = LATIN_WINDOW if len(passage.encode()) < 1.5 * len(passage) else WINDOW
    begins_sentence = span[0] == 0 or _SENTENCE.fullmatch(text[span[0] - 1 : span[0]]) is not None
    start, end = (0, len(passage))
    if len(passage) > width:
        start, end = _window(passage, matches, width, begins_sentence=begins_sentence)
    while start < end and passage[start] in NO_BEGINNING:
        start += 1
    while start < end and passage[end - 1].isspace():
        end -= 1
    before = ELLIPSIS if span[0] + start > 0 else ""
    after = ELLIPSIS if span[1] < len(text) or passage[end:].strip() else ""
    inside = [(a, b) for a, b, _ in matches if a >= start and b <= end]
    # Three replaces take a tenth of what one translate takes.
    shown = passage[start:end].replace("\n", " ").replace("\r", " ").replace("\t", " ")
    return Snippet(before + shown + after, _merge(inside, len(before) - start))


def _fold(text: str) -> str:
    """Returns the text as the lexical index reads it, with equal positions."""
    if not _OTHER_SHAPES.search(text):
        lower = text.lower()
        if len(lower) == len(text):
            return lower
    return text.translate(_FOLDING)


def _find(text: str, terms: Sequence[str]) -> list[Match]:
    """Finds start, end and term of each match, in order of position."""
    found = []
    for term in terms:
        position = text.find(term)
        while position >= 0:
            end = position + len(term)
            if not term.isascii() or _is_word(text, position, end):
                found.append((position, end, term))
            position = text.find(term, position + 1)
    found.sort()
    return found


def _is_word(text: str, start: int, end: int) -> bool:
    """Returns whether the term is a whole word: `in` does not match inside `aspirin`."""
    before, after = text[start - 1 : start], text[end : end + 1]
    return not (before.isascii() and before.isalnum()) and not (after.isascii() and after.isalnum())


def _window(text: str, matches: Sequence[Match], width: int, *, begins_sentence: bool) -> Range:
    """Returns the first range of `width` characters with the most different terms, then the most matches.

    It begins and ends with a sentence or a clause if one is near.
    """
    first, last = _densest(matches, width) if matches else (0, 0)
    centred = max(0, min(first - (width - (last - first)) // 2, len(text) - width))
    # An earlier start would push the last match out; without a match, a later one would hide too much.
    earliest, latest = max(0, last - width - width // 6), first if matches else width // 3
    beginnings = _beginnings(text, earliest, latest, begins_sentence=begins_sentence)
    start = min(beginnings, key=lambda position: abs(position - centred), default=centred)
    start = _start_of_word(text, start, max(first, start))
    limit = min(len(text), max(last, start + width))
    if limit == len(text):
        return start, limit
    ends = [found.end() for found in _SENTENCE.finditer(text, max(last - 1, start + width * 2 // 3), limit)]
    return start, ends[-1] if ends else max(last, _end_of_word(text, limit))


def _beginnings(text: str, earliest: int, latest: int, *, begins_sentence: bool) -> list[int]:
    """Returns where sentences, or else clauses, begin from `earliest` to `latest`."""
    for boundary in (_SENTENCE, _CLAUSE):
        found = [match.end() for match in boundary.finditer(text, max(0, earliest - 1), latest)]
        found = [position for position in found if position >= earliest]
        if earliest == 0 and begins_sentence:
            found.append(0)
        if found:
            return found
    return []


def _densest(matches: Sequence[Match], width: int) -> Range:
    """Finds the start and the end of the matches in the best window, in one pass."""
    best, chosen = (0, 0), (0, 0)
    count: dict[str, int] = {}
    last = 0
    for first, (start, _, term) in enumerate(matches):
        while last < len(matches) and matches[last][1] <= start + width:
            count[matches[last][2]] = count.get(matches[last][2], 0) + 1
            last += 1
        if (len(count), last - first) > best:
            best, chosen = (len(count), last - first), (first, last)
        if count[term] == 1:
            del count[term]
        else:
            count[term] -= 1
    return matches[chosen[0]][0], max(end for _, end, _ in matches[slice(*chosen)])


def _start_of_word(text: str, start: int, limit: int) -> int:
    """Returns the next position from `start` on that does not cut a Latin word, or `start` if none is near."""
    near = range(start, min(limit, start + LONGEST_WORD) + 1)
    return next((position for position in near if not _inside_word(text, position)), start)


def _end_of_word(text: str, end: int) -> int:
    near = range(min(end, len(text)), max(0, end - LONGEST_WORD), -1)
    return next((position for position in near if not _inside_word(text, position)), end)


def _inside_word(text: str, position: int) -> bool:
    around = text[max(0, position - 1) : position + 1]
    return len(around) == 2 and around.isascii() and around.isalnum()


def _merge(ranges: Sequence[Range], shift: int) -> list[Range]:
    """Moves sorted ranges by `shift`, and joins those that touch or overlap."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and start + shift <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end + shift))
        else:
            merged.append((start + shift, end + shift))
    return merged
