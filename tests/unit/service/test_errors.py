"""The table from errors to HTTP; an error outside of it reveals only that something failed."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ValidationError

from indexer.errors import BadFilter
from models.errors import CareError
from service import errors
from service.errors import INTERNAL, STATUS_AND_CODE, InvalidRequest, RateLimited, answer_for, invalid_request
from service.http.documents import DocumentsRequest
from service.http.texts import EmbeddingsRequest, RerankRequest
from service.search.request import SearchRequest


def test_every_error_that_a_request_can_cause_is_in_the_table() -> None:
    own = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, CareError) and value.__module__ == errors.__name__
    }
    # Raised before any request is answered.
    at_startup = {errors.BadDevice, errors.BadKeys, errors.BadSettings, errors.PortTaken, errors.StartFailed}
    assert own - set(STATUS_AND_CODE) == at_startup


@pytest.mark.parametrize("kind", list(STATUS_AND_CODE))
def test_the_table_gives_status_code_and_message(kind: type[CareError]) -> None:
    arguments: dict[type[CareError], tuple[object, ...]] = {
        InvalidRequest: ("field", "the reason"),
        BadFilter: ("field", "the reason"),
        RateLimited: ("the reason", 1.0),
    }
    error = kind(*arguments.get(kind, ("the reason",)))
    answer = answer_for(error)
    assert (answer.status, answer.code) == STATUS_AND_CODE[kind]
    assert "the reason" in answer.message
    assert (b"retry-after" in dict(answer.header_pairs())) == (answer.status in (429, 503))


@pytest.mark.parametrize("error", [RuntimeError("secret"), CareError("secret"), errors.PortTaken("secret")])
def test_an_unknown_exception_reveals_nothing(error: Exception) -> None:
    answer = answer_for(error)
    assert (answer.status, answer.code) == INTERNAL
    assert b"secret" not in answer.body("id")


def test_the_error_body_has_field_and_request_id() -> None:
    body = json.loads(answer_for(InvalidRequest("top_k", "too large")).body("r1"))
    expected = {"code": "invalid_request", "message": "top_k: too large", "field": "top_k", "request_id": "r1"}
    assert body == {"error": expected}


def test_a_filter_that_the_store_refuses_is_reported_as_field_filters() -> None:
    assert answer_for(BadFilter("colour", "no such field")).field == "filters"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"query": ["a", 1]}', "query[1]: Input should be a valid string"),
        ('{"query": "a", "filters": [{"field": "x"}]}', "filters[0]: give exactly one of"),
        ('{"query": "a", "filters": [{"field": "x", "in": ["a", null]}]}', "filters[0].in[1]: "),
        ('{"query": "a", "filters": [{"any": [{"not": {"field": ""}}]}]}', "filters[0].any[0].not.field: "),
        ('{"query": "a", "filters": [{"field": "x", "equals": 1}]}', "filters[0].equals: there is no such field"),
        ('{"query": "a", "filters": {"kind": "drug"}}', 'for example [{"field": "kind", "eq": "drug"}]'),
        ('{"query": "a", "topk": 1}', "topk: there is no such field; did you mean top_k?"),
        ('{"querry": "a"}', "querry: there is no such field; did you mean query?"),
        ('{"query": "a", "hyde": {"documnts": 1}}', "hyde.documnts: there is no such field; did you mean documents?"),
        ('{"query": "a", "zzz": 1}', "zzz: there is no such field; there are query, top_k, offset, "),
        ('{"query": "a", "%s": 1}' % ("x" * 10**6), f"{'x' * 100}: there is no such field"),
        ("{}", "query: Field required"),
        ("{", "body: Invalid JSON"),
    ],
)
def test_a_validation_error_names_the_key_and_the_nearest_name(body: str, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SearchRequest.model_validate_json(body)
    message = str(invalid_request(caught.value, SearchRequest))
    assert expected in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ('{"id": "x", "text": 7}', "documents[1].text: Input should be a valid string"),
        ('{"id": "x", "txt": "y"}', "documents[1].txt: there is no such field; did you mean text?"),
        ('{"text": "y"}', "documents[1]: give an id, under one of the names id and _id"),
        ('{"id": "x", "_id": "x", "text": "y"}', "documents[1]: give an id, under one of the names id and _id"),
        ('{"_id": "", "text": "y"}', "documents[1]._id: "),
    ],
)
def test_an_error_in_a_posted_document_names_its_key(document: str, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DocumentsRequest.model_validate_json(f'{{"documents": [{{"id": "a", "text": "b"}}, {document}]}}')
    error = invalid_request(caught.value, DocumentsRequest)
    assert (error.field, expected in str(error)) == ("documents", True), str(error)


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (SearchRequest, '{"query": [%s]}'),
        (SearchRequest, '{"query": "a", "fields": [%s]}'),
        (SearchRequest, '{"query": "a", "filters": [%s]}'),
        (SearchRequest, '{"query": "a", "filters": [{"field": "kind", "in": [%s]}]}'),
        (EmbeddingsRequest, '{"input": [%s]}'),
        (RerankRequest, '{"query": "a", "documents": [%s]}'),
        (DocumentsRequest, '{"documents": [%s]}'),
    ],
)
def test_only_the_first_of_many_errors_in_a_list_is_reported(model: type[BaseModel], body: str) -> None:
    """Collecting them all took up to half a minute for a body of 2 MB, during which no other request was answered."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(body % ", ".join(["null"] * 1000), strict=True)
    assert caught.value.error_count() <= 5
    assert "[0]" in str(invalid_request(caught.value, model))
