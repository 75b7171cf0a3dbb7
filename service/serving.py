"""What a request is answered from: one snapshot and the encoder that reads queries for it, as one immutable value.

A request takes the current serving once and keeps it to its last byte; the one that was replaced is closed by the
interpreter when its last request lets go. Knows nothing of HTTP or of batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexer.store import Filter, Snapshot
from models.errors import BadEncoder
from models.reader import TextReader
from models.spec import EncoderSpec, Side

Mask = NDArray[np.bool_]
MEMORISED_FILTERS = 32


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Serving:
    """Compared by identity: two openings of one version are two servings.

    `allowed(filters)` is the boolean array over passage rows that a filter admits, remembered for the last few
    filters; it raises BadFilter.
    """

    snapshot: Snapshot
    encoder: TextReader
    facets: dict[str, dict[str, int]]
    allowed: Callable[[tuple[Filter, ...]], Mask]

    @property
    def version(self) -> str:
        return self.snapshot.version

    @classmethod
    def open(cls, folder: Path, encoder: TextReader, *, verify: bool = True) -> Serving:
        """Opens a snapshot for this encoder; refuses one that is damaged or lives in another space."""
        snapshot = Snapshot.open(folder, verify=verify)
        snapshot.manifest.require_encoder(encoder.spec)

        @lru_cache(maxsize=MEMORISED_FILTERS)
        def allowed(filters: tuple[Filter, ...]) -> Mask:
            return snapshot.metadata.select(filters)[snapshot.passages.documents]

        return cls(snapshot, encoder, snapshot.metadata.facets(), allowed)


def require_query_encoder(folder: Path) -> Path:
    """The folder, refused where its encoder cannot read queries."""
    if Side.QUERY not in EncoderSpec.load(folder).sides:
        raise BadEncoder(f"{folder} is an encoder of documents; set CARE_ENCODER to the folder of the query encoder")
    return folder


def is_same_function(folder: Path, encoder: TextReader) -> bool:
    """Whether the folder still holds what was loaded from it."""
    return EncoderSpec.load(folder).fingerprint(encoder.variant.filename) == encoder.fingerprint
