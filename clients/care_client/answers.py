"""What the service answers, as plain values. A field that this version does not know is left out, not an error."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Mapping[str, Any]


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
class Placing:
    """A place in the ranking of one side, the best being 1."""

    rank: int
    score: float

    @classmethod
    def parse(cls, json: Json | None) -> Placing | None:
        return None if json is None else cls(json["rank"], json["score"])


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a hit came to its score; None for a side that did not find it, or did not look."""

    dense: Placing | None
    lexical: Placing | None
    weight: float | None

    @classmethod
    def parse(cls, json: Json | None) -> Explanation | None:
        if json is None:
            return None
        return cls(Placing.parse(json["dense"]), Placing.parse(json["lexical"]), json["weight"])


@dataclass(frozen=True, slots=True)
class Hit:
    """A document that was found; what was not asked for is None or empty."""

    id: str
    score: float
    title: str | None = None
    snippet: str | None = None
    highlights: tuple[tuple[int, int], ...] = ()
    text: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    passages: tuple[Passage, ...] = ()
    explanation: Explanation | None = None

    @classmethod
    def parse(cls, json: Json) -> Hit:
        return cls(
            json["id"],
            json["score"],
            json.get("title"),
            json.get("snippet"),
            _ranges(json),
            json.get("text"),
            json.get("metadata") or {},
            tuple(Passage.parse(passage) for passage in json.get("passages") or ()),
            Explanation.parse(json.get("explain")),
        )


@dataclass(frozen=True, slots=True)
class Result:
    """The ranking of one query.

    `truncated` says that the query was longer than the encoder reads; `hyde` whether imagined documents were "used" or
    "failed" to come, None if none were asked for; `facets` has documents per value of each field that was asked for.
    """

    hits: tuple[Hit, ...]
    truncated: bool
    hyde: str | None = None
    facets: dict[str, dict[str, int]] = field(default_factory=dict)

    @classmethod
    def parse(cls, json: Json) -> Result:
        hits = tuple(Hit.parse(hit) for hit in json["hits"])
        return cls(hits, json["truncated"], json.get("hyde"), json.get("facets") or {})


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
class Document:
    """A whole document."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any]
    snapshot: str

    @classmethod
    def parse(cls, json: Json) -> Document:
        return cls(json["id"], json["title"], json["text"], json["metadata"], json["snapshot"])


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of documents that were added or deleted: it is on the disk, and in every answer within a second.

    `changed` is how many documents are now otherwise than before, `position` how far the service's log is.
    """

    position: int
    changed: int
    snapshot: str

    @classmethod
    def parse(cls, json: Json) -> Changes:
        return cls(json["position"], json["changed"], json["snapshot"])


@dataclass(frozen=True, slots=True)
class Collection:
    """What is served. `fields` are the metadata that filters may name, `facets` documents per value of some, `numbers`
    the `min` and `max` of those that hold numbers."""

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

    @classmethod
    def parse(cls, json: Json) -> Collection:
        return cls(
            json["snapshot"],
            json["documents"],
            json["passages"],
            tuple(json["modes"]),
            json["default_mode"],
            json["max_top_k"],
            json["max_queries"],
            tuple(json["fields"]),
            json["facets"],
            json["encoder"],
            json.get("numbers") or {},
        )


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
        """Best first."""
        return tuple(cls(result["index"], result["relevance_score"]) for result in json["results"])


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a real query just went through; `reason` says why it did not."""

    ready: bool
    snapshot: str | None
    reason: str | None

    @classmethod
    def parse(cls, json: Json) -> Health:
        if "error" in json:
            return cls(False, None, json["error"]["message"])
        return cls(json["status"] == "ready", json["snapshot"], None)


def _ranges(json: Json) -> tuple[tuple[int, int], ...]:
    return tuple((start, end) for start, end in json.get("highlights") or ())


def _floats(encoded: str) -> array[float]:
    """Float32, little-endian, in base64."""
    values = array("f", base64.b64decode(encoded, validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return values
