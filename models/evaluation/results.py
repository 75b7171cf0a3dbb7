"""What an evaluation found, as plain values, and the one file that keeps it.

A run is written as gzipped JSON: figures, and for every query its metrics and its first hits with their texts, so that
two runs can be compared query by query long after. Knows nothing of how the numbers came about.
"""

from __future__ import annotations

import gzip
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from models.errors import BadData
from models.evaluation.sets import Kind

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Hit:
    """One place of a ranking: the document's id, the beginning of its text, and its grade (0 where not judged)."""

    id: str
    text: str
    grade: int


@dataclass(frozen=True, slots=True)
class QueryResult:
    """One query of one set by one system; metrics lie between 0 and 1."""

    id: str
    text: str
    metrics: dict[str, float]
    hits: list[Hit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SetResult:
    """One set by one system: figures in percent, and the queries behind them (none for sentence pairs)."""

    benchmark: str
    set_name: str
    kind: Kind
    system: str
    main_metric: str
    metrics: dict[str, float]
    queries: list[QueryResult]
    queries_per_second: float | None
    """Of the online half alone: reading the query and searching, one query at a time; None where not measured."""

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


@dataclass(frozen=True, slots=True)
class Curve:
    """A picture's data: points (x, y) of one named line, in one named study."""

    study: str
    set_name: str
    line: str
    x_label: str
    y_label: str
    points: list[tuple[float, float]]


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
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(orjson.dumps({"format": FORMAT, **asdict(self)}), mtime=0))

    @classmethod
    def load(cls, path: Path) -> Run:
        """Reads what `save` wrote; raises BadData for anything else."""
        try:
            values = orjson.loads(gzip.decompress(path.read_bytes()))
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise BadData(f"{path}: not a run of this version; run care eval again")
            return TypeAdapter(cls).validate_python(values)
        except (OSError, EOFError, ValueError, ValidationError) as error:
            raise BadData(f"{path}: not a run that care eval wrote ({error})") from error
