"""What the caller of an import says about a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.encoder.spec import Pooling


@dataclass(frozen=True, slots=True)
class Given:
    """What the caller says about a checkpoint; None: what the checkpoint says of itself."""

    space: str | None = None
    pooling: Pooling | None = None
    dim: int | None = None
    max_length: int | None = None
    dtype: str | None = None
    """In which numbers the weights are written."""
    query_instruction: str | None = None
    document_instruction: str | None = None
    adapter: Path | None = None
    """What `care train` wrote beside an encoder that it trained by LoRA; its encoder.json says how it is used."""
    beside: str | None = None
    """The checkpoint of the second encoder, if the adapter's documents were read by two."""
