from __future__ import annotations

import json
from urllib.parse import urlencode

import pytest
from pydantic import ValidationError

from indexer.store.filters import AnyOf, Either, Equal, Filter, Not, Range
from service.errors import InvalidRequest
from service.search.request import FilterClause, SearchRequest, parse_query_string, require_few_parts


@pytest.mark.parametrize(
    ("clause", "expected"),
    [
        ({"field": "kind", "eq": "drug"}, Equal("kind", "drug")),
        ({"field": "year", "eq": 2024}, Equal("year", 2024)),
        ({"field": "open", "eq": True}, Equal("open", "true")),
        ({"field": "open", "eq": False}, Equal("open", "false")),
        ({"field": "kind", "in": ["a", 1, False]}, AnyOf("kind", ("a", 1, "false"))),
        ({"field": "year", "gte": 2020, "lt": 2021.5}, Range("year", gte=2020, lt=2021.5)),
        ({"field": "pid", "eq": 2**53 + 1}, Equal("pid", 2**53 + 1)),
        ({"field": "pid", "gte": -(2**63), "lt": 2**63 - 1}, Range("pid", gte=-(2**63), lt=2**63 - 1)),
        ({"field": "updated", "gt": "2025"}, Range("updated", gt="2025")),
        ({"not": {"field": "kind", "eq": "drug"}}, Not(Equal("kind", "drug"))),
        (
            {"any": [{"field": "kind", "eq": "drug"}, {"not": {"field": "year", "lt": 2020}}]},
            Either((Equal("kind", "drug"), Not(Range("year", lt=2020)))),
        ),
    ],
)
def test_a_clause_becomes_a_filter_of_the_store(clause: dict, expected: Filter) -> None:
    found = FilterClause.model_validate_json(json.dumps(clause), strict=True).to_filter()
    assert found == expected
    assert type(getattr(found, "value", None)) is type(getattr(expected, "value", None))


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("kind:eq:drug", Equal("kind", "drug")),
        ("kind:not.in:test,drug", Not(AnyOf("kind", ("test", "drug")))),
        ("kind:eq:", Equal("kind", "")),
        ("kind:eq:a:in:b\nc", Equal("kind", "a:in:b\nc")),
        ("dc:type:eq:book", Equal("dc:type", "book")),
        ("dc:type:not.gte:b", Not(Range("dc:type", gte="b"))),
        ("url::in:a", AnyOf("url:", ("a",))),
        ("a:not:eq:b", Equal("a:not", "b")),
    ],
)
def test_a_filter_of_a_url_names_a_field_and_an_operator(parameter: str, expected: Filter) -> None:
    request = parse_query_string(urlencode({"q": "a", "filter": parameter}).encode())
    assert [clause.to_filter() for clause in request.filters] == [expected]


@pytest.mark.parametrize(
    "parameter", ["kind", "kind:eq", "kind:like:x", "kind:not:eq", "kind:not.like:x", "eq:drug", ""]
)
def test_a_filter_of_a_url_without_an_operator_is_refused(parameter: str) -> None:
    with pytest.raises(InvalidRequest, match="filters: must read field:operator:value"):
        parse_query_string(urlencode({"q": "a", "filter": parameter}).encode())


@pytest.mark.parametrize(
    "clause",
    [
        {"field": "kind"},
        {"field": "", "eq": "a"},
        {"field": "kind", "eq": None},
        {"field": "kind", "eq": ["a"]},
        {"field": "kind", "eq": "a", "gte": "b"},
        {"field": "kind", "in": ["a"], "eq": "a"},
        {"field": "kind", "in": "a"},
        {"field": "kind", "in": ["a"] * 1001},
        {"field": "kind", "eq": "a" * 1001},
        {"field": "year", "eq": 10**400},
        {"eq": "a"},
        {},
        {"field": "kind", "not": {"field": "kind", "eq": "a"}},
        {"not": {"field": "kind"}},
        {"not": {"field": "kind", "eq": "a"}, "any": [{"field": "kind", "eq": "a"}]},
        {"any": []},
        {"any": [{"field": "kind", "eq": "a"}] * 33},
        {"field": "year", "eq": 2**63},
    ],
)
def test_a_meaningless_clause_is_refused(clause: dict) -> None:
    with pytest.raises(ValidationError):
        FilterClause.model_validate_json(json.dumps(clause), strict=True)


def test_nested_clauses_count_towards_the_limit() -> None:
    leaf = {"field": "kind", "eq": "a"}
    allowed = [{"any": [leaf] * 15}, {"not": {"any": [leaf] * 13}}, leaf]
    assert SearchRequest.model_validate({"query": "a", "filters": allowed})
    with pytest.raises(ValidationError, match="at most 32 clauses, nested ones included"):
        SearchRequest.model_validate({"query": "a", "filters": [*allowed, leaf]})


@pytest.mark.parametrize(("inner", "outer"), [("any", "not"), ("alternatives", "excluded"), ("\\u0061ny", "not")])
def test_a_megabyte_of_nested_clauses_is_refused_before_validation(inner: str, outer: str) -> None:
    leaf = '{"field":"kind","eq":"a"}'
    leaf = f'{{"{outer}":' * 20 + leaf + "}" * 20
    for width in (8, 32, 32):
        leaf = f'{{"{inner}":[{",".join([leaf] * width)}]}}'
    with pytest.raises(InvalidRequest, match="at most 32 clauses"):
        require_few_parts(f'{{"query":"a","filters":[{leaf}]}}'.encode(), 1000)
    require_few_parts(f'{{"query":"{"a" * 5000}","filters":[{{"any":[{{"field":"kind","eq":"a"}}]}}]}}'.encode(), 1)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (b'{"min_score":NaN,"filters":[' + b"{}," * 2000 + b"{}]}", "body", "is not JSON"),
        (b"[" * 5000, "body", "is not JSON"),
        (b'{"documents":[' + b'"a",' * 2000 + b'"a"]}', "documents", "at most 1000 elements, got 2001"),
        (b"{" + b",".join(b'"%d":1' % each for each in range(2000)) + b"}", "body", "has 2000 fields"),
    ],
)
def test_a_large_body_with_too_many_parts_is_refused_before_validation(body: bytes, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        require_few_parts(body, 1000)
    assert refused.value.field == field


def test_a_large_body_of_another_kind_is_left_to_validation() -> None:
    require_few_parts(b'["' + b"a" * 5000 + b'"]', 1)


def test_a_number_of_more_than_64_bits_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError) as caught:
        FilterClause.model_validate_json(json.dumps({"field": "pid", "in": [2**63]}), strict=True)
    assert "more than 64 bits" in caught.value.errors()[0]["msg"]
