"""Benchmarks, one TOML file each: its sets, their sources, and their metrics."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from models.errors import BadData, CareError
from models.evaluation.sets import METRICS, Kind

FOLDER = Path(__file__).parent
ROUNDING = 0.05
"""How far a count may lie from one that the paper rounds."""

Line = Annotated[str, Field(min_length=1, pattern=r"^[^\n]*$")]
Positive = Annotated[int, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Counts(_Section):
    """How large the set is; data of another size are not the benchmark's."""

    queries: Positive
    """Lists of candidates for reranking, sentence pairs for STS."""
    documents: Positive | None = None
    rounded: bool = False

    def differ(self, queries: int, documents: int | None) -> str | None:
        """Returns what does not fit, in words; None if everything does."""
        for what, found, expected in (("queries", queries, self.queries), ("documents", documents, self.documents)):
            tolerance = ROUNDING * (expected or 0) if self.rounded else 0
            if found is not None and expected is not None and abs(found - expected) > tolerance:
                return f"{found:,} {what} where the benchmark has {'about ' * self.rounded}{expected:,}"
        return None


class SetSpec(_Section):
    """One set: `mteb` names mteb's task, `hub` a dataset repository, neither means that only a folder can bring it."""

    name: Line
    kind: Kind
    metric: str
    counts: Counts
    split: Line = "test"
    path: Path | None = None
    """Where the set lies in a data folder, if not under its own name."""
    mteb: Line | None = None
    hub: Line | None = None
    subset: Line | None = None
    """Of a hub repository that holds several sets."""
    obtain: Line | None = None
    """How a person gets the data if no library brings them."""
    relevant: Positive = 1
    """The lowest grade of a candidate that answers the query."""
    query_instruction: Line | None = None
    document_instruction: Line | None = None
    hyde: Line | None = None
    """Which of the benchmark's `[prompts]` asks a language model for a document that would answer the query."""
    note: Line | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.metric not in METRICS[self.kind]:
            raise ValueError(f"metric {self.metric!r} is not one of {', '.join(METRICS[self.kind])}")
        if self.mteb and self.hub:
            raise ValueError("give mteb or hub, not both")
        if not (self.mteb or self.hub or self.obtain):
            raise ValueError("give mteb, hub or obtain, which says how to get the set")
        return self


class Benchmark(_Section):
    """The content of a benchmark's file; the file's name is the benchmark's."""

    name: Line
    title: Line
    about: Line
    source: Line
    """The paper and its tables that the facts come from."""
    licence: Line
    note: Line | None = None
    """What a reader of the figures must know."""
    query_instruction: Line | None = None
    """For training on pairs of no particular task."""
    prompts: dict[str, str] = {}
    sets: Annotated[list[SetSpec], Field(min_length=1)]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        names = [item.name for item in self.sets]
        if len(set(names)) < len(names):
            raise ValueError("two sets have one name")
        for key, text in self.prompts.items():
            if text.count("{query}") != 1:
                raise ValueError(f"prompt {key!r} must hold {{query}} once")
        unknown = {item.hyde for item in self.sets if item.hyde} - set(self.prompts)
        if unknown:
            raise ValueError(f"[prompts] lacks {', '.join(sorted(unknown))}")
        return self

    def hyde_prompt(self, item: SetSpec) -> str | None:
        """Returns the text with {query} in it that the set's `hyde` names."""
        return self.prompts[item.hyde] if item.hyde else None


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> Benchmark:
    """Returns the benchmark of that name; an unknown name is answered with the known ones."""
    if name not in names():
        raise CareError(f"no benchmark is called {name!r}; there are {', '.join(names())}")
    return read_file(FOLDER / f"{name}.toml")


def wording(reference: str) -> str:
    """Returns the query instruction of a benchmark ("cmedteb") or of one of its sets ("cmedteb/cmedteb-retrieval").

    Evaluation and training both take their instructions from here.
    """
    name, _, of_set = reference.partition("/")
    benchmark = read(name)
    if not of_set:
        found = benchmark.query_instruction
    else:
        found = next((item.query_instruction for item in benchmark.sets if item.name == of_set), None)
    if found is None:
        known = [f"{name}/{item.name}" for item in benchmark.sets if item.query_instruction]
        raise BadData(f"{reference!r} has no query_instruction; there are {', '.join(known) or 'none'}")
    return found


def read_file(path: Path) -> Benchmark:
    """Reads a benchmark file; raises BadData with the file and the field that is wrong."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return Benchmark.model_validate({"name": path.stem, **values})
    except FileNotFoundError as error:
        raise BadData(f"{path}: no such file") from error
    except tomllib.TOMLDecodeError as error:
        raise BadData(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise BadData(f"{path}: {field}: {first['msg']}") from error
