"""Checks of the load test's answers: each fault is detected, and a right answer passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.answers import (
    BadAnswer,
    check_collection,
    check_document,
    check_file,
    check_page,
    check_search,
    read_queries,
)
from loadtest.harness import BadQueries

REPOSITORY = Path(__file__).parents[3]
ONE = {"query": "发烧", "top_k": 2}
FILTERED = ONE | {"filters": [{"field": "kind", "eq": "drug"}]}


def hit(id: str, score: float, kind: object = "drug") -> dict[str, Any]:
    return {"id": id, "score": score, "title": "…", "metadata": {"kind": kind}}


def answer(*results: list[dict[str, Any]], **other: object) -> bytes:
    whole = {"results": [{"hits": hits, "truncated": False} for hits in results], "snapshot": "v1"}
    return json.dumps(whole | {"timings_ms": {"total": 2.5}} | other).encode()


def test_a_right_answer_gives_its_hits() -> None:
    hits = [hit("a", 0.9), hit("b", 0.9)]
    assert check_search(ONE, answer(hits)) == [hits]
    assert check_search(ONE | {"query": ["发烧", "头痛"]}, answer(hits, hits[:1])) == [hits, hits[:1]]


@pytest.mark.parametrize(
    ("body", "content", "fault"),
    [
        (ONE, b"", "not JSON"),
        (ONE, b"[]", "not an object"),
        (ONE, b"{}", "not the shape"),
        (ONE, answer([hit("a", 1)], snapshot=""), "of one snapshot"),
        (ONE, answer([hit("a", 1)], timings_ms={}), "not the shape"),
        (ONE, answer([hit("a", 1)], [hit("a", 1)]), "not one result per query"),
        (ONE, answer([]), "no hits"),
        (ONE, answer([hit("a", 1), hit("b", 1), hit("c", 1)]), "more hits than top_k"),
        (ONE, answer([hit("a", 1), hit("b", 2)]), "order of their scores"),
        (ONE, answer([hit("a", 1), hit("a", 1)]), "twice"),
        (ONE, answer([{"id": "a"}, {"id": "b"}]), "not the shape"),
        (ONE, answer(results=None), "not the shape"),
        (FILTERED, answer([hit("a", 1, "disease")]), "the filter"),
        (FILTERED, answer([hit("a", 1, ["test", "disease"])]), "the filter"),
        (ONE | {"query": ["发烧", "头痛"]}, answer([hit("a", 1)], []), "no hits"),
    ],
)
def test_a_fault_is_detected(body: dict[str, Any], content: bytes, fault: str) -> None:
    with pytest.raises(BadAnswer, match=fault):
        check_search(body, content)


def test_a_filter_may_be_satisfied_by_one_of_many_values() -> None:
    assert check_search(FILTERED, answer([hit("a", 1, ["drug", "test"])]))


def test_a_boolean_is_compared_as_text_with_filter_values() -> None:
    body = ONE | {"filters": [{"field": "kind", "eq": "true"}]}
    assert check_search(body, answer([hit("a", 1, True)]))
    with pytest.raises(BadAnswer, match="the filter"):
        check_search(body, answer([hit("a", 1, False)]))


def test_a_collection_gives_the_fields_for_filters() -> None:
    assert check_collection(b'{"facets": {"kind": {"drug": 3, "test": 1}}}') == {"kind": ["drug", "test"]}
    with pytest.raises(BadAnswer):
        check_collection(b"{}")


def test_a_document_must_be_the_requested_one() -> None:
    check_document("a", b'{"id": "a", "text": "long"}')
    for content in (b'{"id": "b", "text": "long"}', b'{"id": "a", "text": ""}'):
        with pytest.raises(BadAnswer):
            check_document("a", content)


def test_the_page_names_its_files_once_each() -> None:
    page = (REPOSITORY / "service/web/index.html").read_bytes()
    files = check_page(page)
    assert len(files) == len(set(files))
    assert all((REPOSITORY / "service/web" / file.removeprefix("/static/")).is_file() for file in files)
    with pytest.raises(BadAnswer):
        check_page(b"<h1>Bad gateway</h1>")
    with pytest.raises(BadAnswer):
        check_file(b"")


def test_the_example_queries_are_read() -> None:
    queries = read_queries(REPOSITORY / "examples/queries.jsonl")
    assert len(queries) == 100
    assert all(queries)


@pytest.mark.parametrize("content", [None, "", "no json\n", '{"query": "发烧"}\n', "[]\n"])
def test_a_file_without_queries_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(BadQueries, match=r"queries\.jsonl"):
        read_queries(path)
