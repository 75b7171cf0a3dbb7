"""Options of an import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.encoder.spec import Pooling


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Options of `care encoder import` for a checkpoint; None: as the checkpoint itself states."""

    space: str | None = None
    pooling: Pooling | None = None
    dim: int | None = None
    max_length: int | None = None
    dtype: str | None = None
    """Number format of the weights that are written."""
    query_instruction: str | None = None
    document_instruction: str | None = None
    adapter: Path | None = None
    """Folder that `care train` wrote beside an encoder trained by LoRA; its encoder.json states how it is used."""
    beside: str | None = None
    """Checkpoint of the second encoder, if two read the adapter's documents."""
