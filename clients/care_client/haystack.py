"""CARE Search as a Haystack retriever. Needs haystack-ai: `pip install care-search[haystack]`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import date, datetime, time
from math import isfinite
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.errors import FilterError
from haystack.utils import Secret

from care_client.answers import Hit
from care_client.calls import SearchOptions
from care_client.client import KEY_VARIABLE, AsyncCareClient, CareClient
from care_client.retrieval import content_of, metadata_of, search_options

Json = dict[str, Any]
Documents = dict[str, list[Document]]
# Haystack's comparisons, the service's, and whether they are negated.
COMPARISONS = {
    "==": ("eq", False), "!=": ("eq", True), "in": ("in", False), "not in": ("in", True),
    ">": ("gt", False), ">=": ("gte", False), "<": ("lt", False), "<=": ("lte", False),
}  # fmt: skip


@component
class CareRetriever:
    """Finds documents for a query; the metadata of each is its own, with `id`, `title` and `care_score` added.

    `filters` are Haystack's. `passages` 0 gives whole documents, more gives up to that many matching passages of each.
    `options` are any parameters of the search, such as `{"mode": "dense"}`; they override the former. A pipeline that
    is saved names the variable of the key, not the key.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: Secret = Secret.from_env_var(KEY_VARIABLE, strict=False),  # noqa: B008 (Haystack's way; immutable)
        top_k: int = 4,
        passages: int = 0,
        filters: Json | None = None,
        options: Json | None = None,
    ) -> None:
        self.url = url
        self.api_key = api_key
        self.top_k = top_k
        self.passages = passages
        self.filters: Json | None = _plain(filters)
        self.options = options
        self._options(None, None)
        self._client: CareClient | None = None

    @component.output_types(documents=list[Document])
    def run(self, query: str, filters: Json | None = None, top_k: int | None = None) -> Documents:
        """`filters` and `top_k` replace those of the construction for one run."""
        if self._client is None:
            self._client = CareClient(self.url, api_key=self.api_key.resolve_value() or "")
            # Nothing closes a component of Haystack.
            weakref.finalize(self, self._client.close)
        answer = self._client.search(query, **self._options(filters, top_k))
        return {"documents": [_document(hit) for hit in answer.hits]}

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str, filters: Json | None = None, top_k: int | None = None) -> Documents:
        # A client of its own: a pipeline may run in one event loop after another.
        async with AsyncCareClient(self.url, api_key=self.api_key.resolve_value() or "") as client:
            answer = await client.search(query, **self._options(filters, top_k))
        return {"documents": [_document(hit) for hit in answer.hits]}

    def to_dict(self) -> Json:
        own = {name: getattr(self, name) for name in ("url", "top_k", "passages", "filters", "options")}
        saved: Json = default_to_dict(self, api_key=self.api_key.to_dict(), **own)
        return saved

    @classmethod
    def from_dict(cls, data: Json) -> CareRetriever:
        given = data["init_parameters"]
        if isinstance(given.get("api_key"), dict):
            given = given | {"api_key": Secret.from_dict(given["api_key"])}
        made: CareRetriever = default_from_dict(cls, data | {"init_parameters": given})
        return made

    def _options(self, filters: Json | None, top_k: int | None) -> SearchOptions:
        own: Json = {"top_k": self.top_k, "passages": self.passages, "filters": clauses(self.filters)}
        call = {"filters": clauses(filters)} if filters is not None else {}
        return search_options(own, self.options or {}, call, {} if top_k is None else {"top_k": top_k})


def clauses(filters: Mapping[str, Any] | None) -> list[Json]:
    """Converts Haystack's filters to the service's; raises FilterError for what is not a filter of Haystack."""
    plain = _plain(filters) or None
    match plain:
        case None:
            return []
        case {"operator": "AND", "conditions": [*conditions]}:
            return [_clause(each) for each in conditions]
    return [_clause(plain)]


def _clause(condition: object) -> Json:
    match condition:
        case {"field": str(field), "operator": str(operator), "value": value} if operator in COMPARISONS:
            name, negated = COMPARISONS[operator]
            if not _fits(value, several=name == "in"):
                wanted = "a list of texts and numbers" if name == "in" else "a text, a number or a date"
                raise FilterError(f"{condition!r} is not a filter: {operator} takes {wanted}")
            clause = {"field": field.removeprefix("meta."), name: value}
            return {"not": clause} if negated else clause
        case {"operator": "AND" | "OR" | "NOT" as operator, "conditions": [*conditions]}:
            parts = [_clause(each) for each in conditions]
            if operator == "OR":
                return {"any": parts}
            # The service has no nested "all": all conditions hold if none fails. NOT negates their conjunction.
            one_fails = {"any": [{"not": part} for part in parts]}
            return one_fails if operator == "NOT" else {"not": one_fails}
    raise FilterError(
        f'{condition!r} is not a filter; write {{"field": "meta.kind", "operator": "==", "value": "drug"}} '
        f'with an operator of {", ".join(COMPARISONS)}, or {{"operator": "AND", "conditions": […]}} (OR, NOT)'
    )


def _plain(value: Any) -> Any:  # noqa: ANN401 (a filter, or a part of one)
    """Puts texts in place of dates and lists in place of sets: JSON holds the filter, and a pipeline can be saved."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, datetime) and value.time() == time() and value.tzinfo is None:
        value = value.date()  # as a text, 2024-05-01T00:00 would come after 2024-05-01
    return value.isoformat() if isinstance(value, date) else value


def _fits(value: object, *, several: bool) -> bool:
    if several:
        return isinstance(value, list) and bool(value) and all(_fits(each, several=False) for each in value)
    return isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))


def _document(hit: Hit) -> Document:
    return Document(id=hit.id, content=content_of(hit), meta=metadata_of(hit), score=hit.score)
