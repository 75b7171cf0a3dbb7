"""Checks the service's responses against their requests, by the HTTP contract of docs/architecture.md.

Each check takes the body of an answer; it raises BadAnswer or returns what the next request needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtest.harness import BadQueries

PAGE_FILE = re.compile(r'(?:href|src)="(/static/[^"]+)"')


class BadAnswer(Exception):
    """A fault of an answer; the message is short, because failures are counted by it."""


def read_queries(path: Path) -> list[str]:
    """Reads the texts of a JSON-lines file of `{"_id", "text"}`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        queries = [str(json.loads(line)["text"]) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadQueries(f'{path}: give JSON lines like {{"text": "…"}} ({type(error).__name__}: {error})') from error
    if not queries:
        raise BadQueries(f"{path} has no query; give JSON lines with a text each")
    return queries


def check_search(body: Mapping[str, Any], content: bytes) -> list[list[dict[str, Any]]]:
    """Checks and returns the hits of each query of `body`; each must have some. Of filters only `eq` is checked."""
    answer = _parse(content)
    queries = [body["query"]] if isinstance(body["query"], str) else body["query"]
    try:
        if not answer["snapshot"] or answer["timings_ms"]["total"] < 0 or len(answer["results"]) != len(queries):
            raise BadAnswer("not one result per query, of one snapshot and with its timings")
        return [_check_hits(body, result["hits"]) for result in answer["results"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadAnswer("not the shape of a search's answer") from error


def check_collection(content: bytes) -> dict[str, list[str]]:
    """Checks the collection; returns the fields that can be filtered by, and their values."""
    facets = _parse(content).get("facets")
    if not isinstance(facets, dict):
        raise BadAnswer("facets are missing")
    return {field: list(values) for field, values in facets.items()}


def check_document(id: str, content: bytes) -> None:
    """Checks that the answer is the whole document with that id."""
    document = _parse(content)
    if document.get("id") != id or not document.get("text"):
        raise BadAnswer("not the document that was asked for")


def check_page(content: bytes) -> list[str]:
    """Checks the page; returns the paths of the files that it loads."""
    files = PAGE_FILE.findall(content.decode("utf-8", "replace"))
    if not files:
        raise BadAnswer("not the page: it names no file of its own")
    return list(dict.fromkeys(files))


def check_file(content: bytes) -> None:
    if not content:
        raise BadAnswer("an empty file")


def _parse(content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError:
        raise BadAnswer("the body is not JSON") from None
    if not isinstance(answer, dict):
        raise BadAnswer("the body is not an object")
    return answer


def _check_hits(body: Mapping[str, Any], hits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not hits:
        raise BadAnswer("no hits")
    if len(hits) > body["top_k"]:
        raise BadAnswer("more hits than top_k")
    if any(before["score"] < after["score"] for before, after in pairwise(hits)):
        raise BadAnswer("hits are not in the order of their scores")
    if len({hit["id"] for hit in hits}) < len(hits):
        raise BadAnswer("a document is among the hits twice")
    for condition in body.get("filters", ()):
        field, value = condition["field"], condition["eq"]
        if not all(_has(hit["metadata"].get(field), value) for hit in hits):
            raise BadAnswer("a hit does not satisfy the filter")
    return hits


def _has(found: object, value: str) -> bool:
    """Returns whether a hit's metadata has the value of a facet, where true and false are texts."""
    values = found if isinstance(found, list) else [found]
    return value in [str(one).lower() if isinstance(one, bool) else one for one in values]
