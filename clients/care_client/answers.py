"""Response types of the client; fields that this version does not know are ignored."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """A value whose fields have the names that they have in JSON."""

    @classmethod
    def parse(cls, json: Json) -> Self:
        return cls(**_known(cls, json))


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a document that was found: characters `start` to `end` of its text."""

    start: int
    end: int
    score: float
    snippet: str | None
    highlights: tuple[tuple[int, int], ...]
    text: str | None

    @classmethod
    def parse(cls, json: Json) -> Passage:
        start, end = json["span"]
        return cls(start, end, json["score"], json.get("snippet"), _ranges(json), json.get("text"))


@dataclass(frozen=True, slots=True)
class Placing(Answer):
    """A place in the ranking of one side, the best being 1."""

    rank: int
    score: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a hit got its score; None for a side that did not find it or was not searched."""

    dense: Placing | None
    lexical: Placing | None
    weight: float | None

    @classmethod
    def parse(cls, json: Json) -> Explanation:
        dense, lexical = (json[side] and Placing.parse(json[side]) for side in ("dense", "lexical"))
        return cls(dense, lexical, json["weight"])


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found; what was not asked for is None or empty.

    `rerank_score` is the reranker's, between 0 and 1; None if it did not score this hit. `headline` is the title, or
    the beginning of the text of a document without one.
    """

    id: str
    score: float
    rerank_score: float | None = None
    title: str | None = None
    snippet: str | None = None
    highlights: tuple[tuple[int, int], ...] = ()
    text: str | None = None
    headline: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    passages: tuple[Passage, ...] = ()
    explanation: Explanation | None = None

    @classmethod
    def parse(cls, json: Json) -> Hit:
        passages = tuple(Passage.parse(passage) for passage in json.get("passages") or ())
        explanation = Explanation.parse(json["explain"]) if json.get("explain") else None
        made = {"highlights": _ranges(json), "passages": passages, "explanation": explanation}
        return cls(**_known(cls, json) | made)


@dataclass(frozen=True, slots=True)
class Result:
    """The ranking of one query.

    `truncated`: the query was longer than the encoder reads. `hyde`: whether imagined documents were "used" or
    "failed", None if none were asked for. `facets`: documents per value of each requested field. `rerank`: the `depth`
    that was to be reranked, and how many of these documents were `scored` in time.
    """

    hits: tuple[Hit, ...]
    truncated: bool
    hyde: str | None = None
    facets: dict[str, dict[str, int]] = field(default_factory=dict)
    rerank: dict[str, int] | None = None

    @classmethod
    def parse(cls, json: Json) -> Result:
        hits = tuple(Hit.parse(hit) for hit in json["hits"])
        return cls(hits, json["truncated"], json.get("hyde"), json.get("facets") or {}, json.get("rerank"))


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """One result per query, in the order asked, all from one snapshot; milliseconds per stage."""

    results: tuple[Result, ...]
    snapshot: str
    timings_ms: dict[str, float]

    @property
    def hits(self) -> tuple[Hit, ...]:
        """The hits of the only query; for several, look at each of `results`."""
        if len(self.results) != 1:
            raise ValueError(f"there are {len(self.results)} results: take the hits of each")
        return self.results[0].hits

    @classmethod
    def parse(cls, json: Json) -> SearchAnswer:
        results = tuple(Result.parse(result) for result in json["results"])
        return cls(results, json["snapshot"], dict(json["timings_ms"]))


@dataclass(frozen=True, slots=True)
class Document(Answer):
    """A whole document."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any]
    snapshot: str


@dataclass(frozen=True, slots=True)
class Changes(Answer):
    """The result of adding or deleting: the change is on the disk, and in every answer within a second.

    `changed` is the number of documents that changed, `position` the end of the service's log.
    """

    position: int
    changed: int
    snapshot: str


@dataclass(frozen=True, slots=True)
class Collection(Answer):
    """The served collection. `fields` are the metadata that filters may name, `facets` documents per value of some,
    `numbers` the `min` and `max` of those that hold numbers."""

    snapshot: str
    documents: int
    passages: int
    modes: tuple[str, ...]
    default_mode: str
    max_top_k: int
    max_queries: int
    fields: tuple[str, ...]
    facets: dict[str, dict[str, int]]
    encoder: dict[str, Any]
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One unit vector per text, in the order of the texts; `tokens` is how many the encoder read."""

    vectors: tuple[array[float], ...]
    model: str
    tokens: int

    @classmethod
    def parse(cls, json: Json) -> Embeddings:
        entries = sorted(json["data"], key=lambda entry: entry["index"])
        vectors = tuple(_floats(entry["embedding"]) for entry in entries)
        return cls(vectors, json["model"], json["usage"]["total_tokens"])


@dataclass(frozen=True, slots=True)
class Ranked:
    """A text that was ranked: its place in the list that was sent, and how well it answers the query."""

    index: int
    score: float

    @classmethod
    def parse_all(cls, json: Json) -> tuple[Ranked, ...]:
        """Parses the ranked texts, best first."""
        return tuple(cls(result["index"], result["relevance_score"]) for result in json["results"])


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a real query just went through; `reason` says why it did not."""

    ready: bool
    snapshot: str | None
    reason: str | None

    @classmethod
    def parse(cls, json: Json) -> Health:
        return cls(json["status"] == "ready", json["snapshot"], None)


def _known(kind: type[Any], json: Json) -> dict[str, Any]:
    """Returns the members that are fields of the class: null is left out, a list becomes a tuple."""
    known = {each.name: json[each.name] for each in fields(kind) if json.get(each.name) is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}


def _ranges(json: Json) -> tuple[tuple[int, int], ...]:
    return tuple((start, end) for start, end in json.get("highlights") or ())


def _floats(encoded: str) -> array[float]:
    """Decodes base64 of little-endian float32."""
    values = array("f", base64.b64decode(encoded, validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return values
