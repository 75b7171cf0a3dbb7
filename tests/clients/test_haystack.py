"""The Haystack retriever in a Haystack pipeline, against the real service."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from typing import Any

import pytest
from care_client.haystack import CareRetriever, clauses
from haystack import Document, Pipeline
from haystack.errors import FilterError
from haystack.utils import Secret
from haystack.utils.filters import document_matches_filter

from tests.api.support import ENTRIES
from tests.clients.support import ScriptedReply, ScriptedServer

pytestmark = pytest.mark.anyio
DRUG = {"field": "meta.kind", "operator": "==", "value": "drug"}
RECENT = {"field": "meta.year", "operator": ">=", "value": 2024}
FILTERS: list[dict[str, Any]] = [
    DRUG,
    {"field": "meta.kind", "operator": "!=", "value": "drug"},
    {"field": "kind", "operator": "in", "value": ["test", "first-aid"]},
    {"field": "meta.kind", "operator": "not in", "value": ["disease", "drug"]},
    {"field": "meta.year", "operator": "<", "value": 2022},
    {"operator": "AND", "conditions": [DRUG, RECENT]},
    {"operator": "OR", "conditions": [DRUG, RECENT]},
    {"operator": "NOT", "conditions": [DRUG, RECENT]},
    {"operator": "OR", "conditions": [{"operator": "AND", "conditions": [DRUG, RECENT]}, {**DRUG, "value": "test"}]},
]


def test_a_pipeline_finds_documents_and_can_be_saved_and_loaded(service_url: str) -> None:
    pipeline = Pipeline()
    pipeline.add_component("retriever", CareRetriever(service_url, top_k=2, passages=1))
    for each in (pipeline, Pipeline.loads(pipeline.dumps(), allowed_modules=["care_client.haystack"])):
        documents = each.run({"retriever": {"query": "高血压吃什么药"}})["retriever"]["documents"]
        assert len(documents) == 2
        first = documents[0]
        assert first.id == first.meta["id"] == "a-1"
        assert "氨氯地平" in first.content
        assert first.score == first.meta["care_score"] > 0


async def test_it_runs_asynchronously_and_takes_parameters_for_one_run(service_url: str) -> None:
    retriever = CareRetriever(service_url, filters=DRUG, options={"mode": "dense"})
    found = await retriever.run_async("头痛", top_k=1)
    assert [document.id for document in found["documents"]] == [retriever.run("头痛")["documents"][0].id]
    others = retriever.run("头痛", filters={**DRUG, "value": "test"})["documents"]
    assert [document.id for document in others] == ["a-8"]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_select_the_same_documents_as_in_haystack(service_url: str, filters: dict[str, Any]) -> None:
    corpus = [Document(id=f"a-{each['id']}", meta={"kind": each["kind"], "year": each["year"]}) for each in ENTRIES]
    # Haystack's own evaluation supports whole names only.
    whole = filters | {"field": f"meta.{filters['field'].removeprefix('meta.')}"} if "field" in filters else filters
    expected = {document.id for document in corpus if document_matches_filter(whole, document)}
    found = CareRetriever(service_url, top_k=8, options={"mode": "dense"}).run("头痛", filters=filters)["documents"]
    assert {document.id for document in found} == expected
    assert 0 < len(expected) < len(corpus)


@pytest.mark.parametrize(
    "wrong",
    [
        {"field": "kind", "eq": "drug"},
        {"field": "kind", "operator": "~", "value": 1},
        {"field": "kind", "operator": ["=="], "value": 1},
        {"operator": "==", "value": "drug"},
        {"field": 7, "operator": "==", "value": "drug"},
        {"field": "meta.kind", "operator": "=="},
        {"field": "meta.kind", "value": "drug"},
        {"operator": "AND"},
        {"conditions": [DRUG]},
        {"operator": "AND", "conditions": DRUG},
        {"operator": "OR", "conditions": "drug"},
        {"operator": "NOT", "conditions": [DRUG, "drug"]},
        {"operator": "AND", "conditions": [{"operator": "OR", "conditions": None}]},
        [DRUG],
    ],
    ids=str,
)
def test_malformed_filters_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(FilterError, match=r"is not a filter; write .*operator") as refused:
        CareRetriever(filters=wrong)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("operator", "value", "sent"),
    [
        (">=", date(2024, 5, 1), {"gte": "2024-05-01"}),
        (">=", datetime(2024, 5, 1), {"gte": "2024-05-01"}),
        ("<", datetime(2024, 5, 1, 12, tzinfo=UTC), {"lt": "2024-05-01T12:00:00+00:00"}),
        ("in", {"drug"}, {"in": ["drug"]}),
        ("in", ("drug", 7), {"in": ["drug", 7]}),
    ],
)
def test_dates_and_sets_become_what_json_holds_and_are_saved(
    operator: str, value: object, sent: dict[str, Any]
) -> None:
    given = {"operator": "AND", "conditions": [{"field": "meta.kind", "operator": operator, "value": value}]}
    assert clauses(given) == [{"field": "kind"} | sent]
    retriever, pipeline = CareRetriever(filters=given), Pipeline()
    pipeline.add_component("care", retriever)
    loaded = Pipeline.loads(pipeline.dumps(), allowed_modules=["care_client.haystack"]).get_component("care")
    assert loaded.filters == retriever.filters


@pytest.mark.parametrize(
    ("operator", "value"),
    [("==", None), ("==", b"drug"), ("==", ["drug"]), (">", math.nan), ("in", "drug"), ("in", []), ("in", [None])],
    ids=str,
)
def test_a_value_that_the_service_would_not_take_is_refused_at_once(operator: str, value: object) -> None:
    with pytest.raises(FilterError, match=f"is not a filter: {operator} takes"):
        CareRetriever(filters={"field": "meta.kind", "operator": operator, "value": value})


def test_a_saved_pipeline_holds_the_name_of_the_variable_and_not_the_key(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARE_API_KEY", "k-1")
    saved = CareRetriever(scripted.url, api_key=Secret.from_env_var("CARE_API_KEY")).to_dict()
    assert "k-1" not in str(saved)
    scripted.replies.append(ScriptedReply())
    CareRetriever.from_dict(saved).run("发热")
    assert scripted.requests[0][3]["authorization"] == "Bearer k-1"
