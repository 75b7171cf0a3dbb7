"""Cache keys: everything that changes an answer changes its key, including fields added later."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from models.encoder.spec import Side
from models.encoder.tokenizer import TextReader, Tokens
from models.fusion import Mode
from service.cache.cache import ResultKeys, embedding_key
from service.search.request import SearchRequest
from service.serving.serving import Models, Serving, are_current
from service.settings import Settings
from tests.api.support import ENCODER

HYBRID = ResultKeys(Settings(default_mode=Mode.HYBRID))


def serving(
    version: str = "v1", encoder: str = "e1", reranker: str = "", state: bytes = b"", query_instruction: str = ""
) -> Serving:
    """Makes a serving with only the facts that keys read."""
    spec = SimpleNamespace(query_instruction=query_instruction, dense_trust=0.0)
    return cast(
        Serving,
        SimpleNamespace(
            name=(version, encoder, reranker),
            overlay=SimpleNamespace(state=state),
            encoder=SimpleNamespace(spec=spec),
        ),
    )


def key(keys: ResultKeys = HYBRID, of: Serving | None = None, **fields: object) -> bytes:
    request = SearchRequest.model_validate({"query": "发热"} | fields)
    (only,) = keys(of or serving(), request, request.queries)
    return only


@pytest.mark.parametrize("field", sorted(set(SearchRequest.model_fields) - {"query"}))
def test_every_field_of_a_request_is_in_the_key(field: str) -> None:
    request = SearchRequest(query="发热")
    other = request.model_copy(update={field: "another value, whatever the field holds"})
    with warnings.catch_warnings(action="ignore"):  # pydantic warns that the value does not have the field's type
        same = HYBRID(serving(), request, ["发热"]) == HYBRID(serving(), other, ["发热"])
    assert same == (field in {"timeout_ms", "bulk", "cache"})


def test_filters_with_different_values_have_different_keys() -> None:
    filters: list[list[dict[str, Any]]] = [
        [{"field": "year", "eq": 1}],
        [{"field": "year", "eq": 1.0}],
        [{"field": "year", "eq": "1"}],
        [{"field": "year", "in": [1]}],
        [{"field": "year", "in": [1, 2]}],
        [{"field": "year", "gte": 1}],
        [{"field": "year", "gt": 1}],
        [{"field": "year", "gte": 1, "lt": 2}],
        [{"field": "month", "eq": 1}],
        [{"field": "year", "eq": 1}, {"field": "month", "eq": 1}],
        [{"not": {"field": "year", "eq": 1}}],
        [{"not": {"field": "year", "eq": 2}}],
        [{"any": [{"field": "year", "eq": 1}]}],
        [{"any": [{"field": "year", "eq": 1}, {"field": "month", "eq": 1}]}],
    ]
    variants: list[dict[str, Any]] = [
        {},
        {"query": "发热 "},
        {"query": "发烧"},
        {"top_k": 11},
        {"offset": 0},
        {"offset": 10},
        {"facets": ["kind"]},
        {"facets": ["kind", "year"]},
        {"mode": "dense"},
        {"mode": "lexical"},
        {"fields": ["title"]},
        {"fields": []},
        {"fusion": "reciprocal"},
        {"weight": 0.5},
        {"weight": 0.0},
        {"min_score": 0.0},
        {"passages": 1},
        {"explain": True},
        {"hyde": True},
        {"hyde": {"documents": 2}},
        {"rerank": True},
        {"rerank": {"depth": 5}},
        *({"filters": clauses} for clauses in filters),
    ]
    assert len({key(**variant) for variant in variants}) == len(variants)


def test_snapshot_encoder_and_the_settings_that_matter_are_in_the_key() -> None:
    others = [
        ResultKeys(Settings(default_mode=Mode.LEXICAL)),
        ResultKeys(Settings(max_top_k=50)),
        ResultKeys(Settings(hyde_url="http://127.0.0.1/v1", hyde_model="one")),
        ResultKeys(Settings(hyde_url="http://127.0.0.1/v1", hyde_model="other")),
    ]
    servings = [serving(version="v2"), serving(encoder="e2"), serving(reranker="r1")]
    servings += [serving(state=b"s1"), serving(state=b"s2"), serving(query_instruction="问：")]
    keys = {key(), *(key(of=each) for each in servings), *map(key, others)}
    assert len(keys) == 11


@pytest.mark.parametrize("change", [{"query_instruction": "问："}, {"dense_trust": 0.5}])
def test_a_folder_that_reads_queries_differently_is_noticed_as_changed(tmp_path: Path, change: dict[str, Any]) -> None:
    """The fingerprint, which describes how documents are read, is the same."""
    reader = TextReader.open(ENCODER)
    assert are_current(Models(reader), ENCODER, None)
    reader.spec.model_copy(update=change).save(tmp_path)
    assert not are_current(Models(reader), tmp_path, None)


def test_parts_of_a_key_are_separated() -> None:
    assert key(of=serving("v1e1", "")) != key(of=serving("v1", "e1"))


def test_a_query_has_one_key_alone_and_among_others() -> None:
    request = SearchRequest(query=["发热", "骨折", "发热"])
    keys = HYBRID(serving(), request, request.queries)
    assert keys == [key(), key(query="骨折"), key()]
    assert all(len(one) == 16 for one in keys)


def test_an_embedding_key_depends_on_encoder_and_tokens() -> None:
    texts = [[1], [2], [1, 2], [2, 1], [1, 0], [256], [1, 256]]
    keys = {embedding_key(name, Tokens(ids, truncated=False)) for name in ("e1", "e2") for ids in texts}
    assert len(keys) == 2 * len(texts)
    assert embedding_key("e1", Tokens([1], truncated=True)) == embedding_key("e1", Tokens([1], truncated=False))


def test_side_and_instruction_reach_the_embedding_key_through_the_tokens() -> None:
    plain = TextReader.open(ENCODER)
    spec = plain.spec.model_copy(update={"query_instruction": "检索："})
    encoder = TextReader(spec, plain.variant, plain.weights, plain.tokenizer)
    texts = ["Fever 发热", "fever  发热 ", "fever 发烧"]
    keys = [embedding_key("e1", tokens) for side in Side for tokens in encoder.tokenize(texts, side)]
    assert keys[0] == keys[1]  # equal tokens give equal keys
    assert len(set(keys)) == 4


def test_tenants_share_neither_results_nor_embeddings() -> None:
    tokens = Tokens([1, 2], truncated=False)
    assert len({embedding_key("e1", tokens, tenant) for tenant in (b"", b"a", b"b")}) == 3
