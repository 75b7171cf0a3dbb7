"""Search parameters and hit texts, shared by the framework integrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from care_client.answers import Hit
from care_client.calls import SearchOptions

FIELDS = ("title", "metadata", "text")
# LangChain's names of search parameters, and the service's.
SYNONYMS = {"k": "top_k", "filter": "filters", "score_threshold": "min_score"}
PARAMETERS = SearchOptions.__annotations__.keys() - {"fields"}
SCORE, RERANK_SCORE = "care_score", "care_rerank_score"
RELEVANCE = "relevance_score"


def search_options(*layers: Mapping[str, Any]) -> SearchOptions:
    """Merges the parameters of a retriever's search; later ones win. Raises ValueError for unknown ones.

    The service's names and LangChain's (`k`, `filter`, `score_threshold`) are accepted. None is the service's default.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        named: dict[str, Any] = {}
        for name, value in layer.items():
            own = SYNONYMS.get(name, name)
            if own not in PARAMETERS:
                near = get_close_matches(name, [*PARAMETERS, *SYNONYMS], 1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(PARAMETERS))}"
                raise ValueError(f"{name}: the retriever has no such search parameter; {hint}")
            if own in named:
                raise ValueError(f"{own}: given twice, under two names; leave one out")
            named[own] = _clauses(value) if own == "filters" and value is not None else value
        merged |= named
    options = {name: value for name, value in merged.items() if value is not None}
    return cast(SearchOptions, {**options, "fields": FIELDS})


def _clauses(filters: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Clauses as the service takes them, also of a mapping of fields to a value, to several values or to a range."""
    if isinstance(filters, Mapping):
        return [_clause(*pair) for pair in filters.items()]
    if isinstance(filters, str) or not isinstance(filters, Sequence):
        raise ValueError('filters: give fields and their values, as {"kind": "drug"}, or a list of clauses')
    return list(filters)


def _clause(field: str, value: object) -> Mapping[str, Any]:
    match value:
        case Mapping():
            return {"field": field, **value}
        case list() | tuple() | set() | frozenset():
            return {"field": field, "in": list(value)}
    return {"field": field, "eq": value}


def content_of(hit: Hit) -> str:
    """Returns the passages that were found, in the order of the text; the whole text if none were asked for.

    Passages overlap; the text that neighbours share is written once. A document without a text is its title.
    """
    text = hit.text or ""
    spans: list[tuple[int, int]] = []
    for start, end in sorted((passage.start, passage.end) for passage in hit.passages):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return "\n\n".join(text[start:end] for start, end in spans) or text or hit.title or ""


def metadata_of(hit: Hit) -> dict[str, Any]:
    """Returns the document's own metadata, with `id` and `title` if it has none of these names, and the scores."""
    second = {} if hit.rerank_score is None else {RERANK_SCORE: hit.rerank_score}
    return {"id": hit.id, "title": hit.title, **hit.metadata, SCORE: hit.score, **second}
