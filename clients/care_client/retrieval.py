"""What the retrievers of all frameworks share: how to ask, and what of a hit a language model reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from care_client.answers import Hit
from care_client.calls import SearchOptions

FIELDS = ("title", "metadata", "text")


def search_options(top_k: int, passages: int, further: Mapping[str, Any]) -> SearchOptions:
    """The parameters of a retriever's search; `further` holds any of the others, by name."""
    return cast(SearchOptions, {**further, "top_k": top_k, "passages": passages, "fields": FIELDS})


def content_of(hit: Hit) -> str:
    """The passages that were found, in the order of the text; the whole text where none were asked for.

    Passages overlap, so that none cuts a thought in two; here what they share is said once.
    """
    text = hit.text or ""
    spans: list[tuple[int, int]] = []
    for start, end in sorted((passage.start, passage.end) for passage in hit.passages):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return "\n\n".join(text[start:end] for start, end in spans) or text


def metadata_of(hit: Hit) -> dict[str, Any]:
    """The document's own metadata, with its id, its title and the score."""
    return {**hit.metadata, "id": hit.id, "title": hit.title, "score": hit.score}
