"""A recipe: every fact of a training run, read from one TOML file. Knows nothing of torch."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.errors import BadData
from models.spec import Pooling

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Data(_Section):
    """Which pairs are read and how often each source is drawn."""

    files: Annotated[list[Path], Field(min_length=1)]
    weights: dict[str, float] = {}
    """Relative number of batches by source; a source that is not named has `default_weight`."""
    default_weight: float = 1.0
    crops: dict[str, Share] = {}
    """By source: how often a random span of the document stands in for the query."""
    query_tokens: Positive = 64
    document_tokens: Positive = 256
    hard_negatives: Annotated[int, Field(ge=0)] = 1


class Batch(_Section):
    size: Positive = 1024
    leaf: Positive = 64
    """A batch is made of groups of this many neighbouring documents, so that in-batch negatives are hard."""


class Loss(_Section):
    temperature: Annotated[float, Field(gt=0)] = 0.03
    distil: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the start encoder's own ranking of the batch; 0 turns it off."""
    teacher_temperature: Annotated[float, Field(gt=0)] = 0.1
    lexical_share: Share = 0.0
    """How much of the teacher's score is BM25 rather than the start encoder's cosine."""
    false_negative_margin: float | None = None
    """Negatives that the start scores above the positive plus this margin are left out of InfoNCE."""


class Optimiser(_Section):
    steps: Positive = 2000
    lr: Annotated[float, Field(gt=0)] = 5e-5
    warmup: Share = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] = 1.0


class Recipe(_Section):
    start: Path
    pooling: Pooling | None = None
    """Needed only if the start's own files do not say it."""
    data: Data
    batch: Batch = Batch()
    loss: Loss = Loss()
    optimiser: Optimiser = Optimiser()
    average: Share = 1.0
    """Weight of the trained parameters in the result; the rest is the start's (1: the trained ones alone)."""
    space: str
    seed: int = 0
    checkpoint_every: Positive = 500

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Reads a recipe; the paths in it are relative to the folder from which `care` is called."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise BadData(f"{path}: no such recipe") from error
        except tomllib.TOMLDecodeError as error:
            raise BadData(f"{path}: not TOML: {error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            raise BadData(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
