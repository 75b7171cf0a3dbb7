"""Result types of an evaluation, and the file that stores them.

A run is written as gzipped JSON: figures, and for every query its metrics and its first hits with their texts, so that
two runs can be compared query by query later.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from models.errors import BadData
from models.evaluation.sets import Kind

FORMAT = 1
COMPRESSION = 6
POSITIVE_COSINE = "positive cosine"
"""A dense system's cosine of a query and the documents that answer it: the mean over those documents."""
SIMILARITY, GOLD_SCORE = "similarity", "gold score"
"""The two values that a sentence pair keeps in place of metrics: the system's cosine, and what people gave it."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One place of a ranking: the document's id, the beginning of its text, and its grade (0 if not judged)."""

    id: str
    text: str
    grade: int


@dataclass(frozen=True, slots=True)
class QueryResult:
    """One query of one set by one system; metrics lie between 0 and 1.

    A sentence pair is kept as one too: its two texts on two lines, SIMILARITY and GOLD_SCORE, no hits.
    """

    id: str
    text: str
    metrics: dict[str, float]
    hits: list[Hit] = field(default_factory=list)
    gold: list[Hit] = field(default_factory=list)
    """The first few documents that answer it, best grade first, found or not."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """One set by one system: figures in percent, and the queries or sentence pairs behind them."""

    benchmark: str
    set_name: str
    kind: Kind
    system: str
    main_metric: str
    metrics: dict[str, float]
    queries: list[QueryResult]
    queries_per_second: float | None
    """Of the online half alone: reading the query and searching, one query at a time; None if not measured."""

    def __post_init__(self) -> None:
        needed = {SIMILARITY, GOLD_SCORE} if self.kind is Kind.STS else {self.main_metric}
        if self.main_metric not in self.metrics or any(needed - query.metrics.keys() for query in self.queries):
            raise ValueError(f"{self.set_name}, {self.system}: {' or '.join(sorted(needed))} is missing")

    @property
    def value(self) -> float:
        """The figure that the papers print."""
        return self.metrics[self.main_metric]


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """What a system is made of, as far as it is known."""

    name: str
    kind: str
    fingerprint: str | None = None
    dim: int | None = None
    parameters: int | None = None
    repeats: str = ""
    """The name of the mean that stands for several systems which differ by a seed; empty for a system of its own."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A picture's data: points (x, y) of one line, in one named study of one system on one set."""

    study: str
    set_name: str
    system: str
    line: str
    x_label: str
    y_label: str
    points: list[tuple[float, float]]
    labels: list[str] = field(default_factory=list)
    """What to write beside each point; empty if the axes are enough."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything one `care eval` measured."""

    made: str
    command: str
    machine: str
    seconds: float
    systems: list[SystemFacts]
    results: list[SetResult]
    curves: list[Curve] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Sets of a benchmark that were not there, each with how to get it."""

    def save(self, path: Path) -> None:
        """Writes the run; every text is written once, as systems find the same documents."""
        texts: dict[str, int] = {}

        def hits(found: list[Hit]) -> list[tuple[str, int, int]]:
            return [(hit.id, texts.setdefault(hit.text, len(texts)), hit.grade) for hit in found]

        def query(each: QueryResult) -> list[Any]:
            text = texts.setdefault(each.text, len(texts))
            return [each.id, text, each.metrics, hits(each.hits), hits(each.gold)]

        results = [
            {**asdict(replace(result, queries=[])), "queries": list(map(query, result.queries))}
            for result in self.results
        ]
        values = {"format": FORMAT, **asdict(replace(self, results=[])), "results": results, "texts": list(texts)}
        path.write_bytes(gzip.compress(orjson.dumps(values), COMPRESSION, mtime=0))

    @classmethod
    def load(cls, path: Path) -> Run:
        """Reads what `save` wrote; raises BadData for anything else."""
        try:
            values = orjson.loads(gzip.decompress(path.read_bytes()))
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise BadData(f"{path}: not a run of this version; run care eval again")
            texts = values.pop("texts")

            def hits(found: list[Any]) -> list[dict[str, Any]]:
                return [{"id": id, "text": texts[text], "grade": grade} for id, text, grade in found]

            for result in values["results"]:
                result["queries"] = [
                    {"id": id, "text": texts[text], "metrics": metrics, "hits": hits(found), "gold": hits(gold)}
                    for id, text, metrics, found, gold in result["queries"]
                ]
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            fault = error.errors()[0]
            reason = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            raise BadData(f"{path}: not a run that care eval wrote ({reason})") from error
        except (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error) as error:
            raise BadData(f"{path}: not a run that care eval wrote ({error})") from error
