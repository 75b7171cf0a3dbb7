"""What a request is answered from: one snapshot and the encoder that reads queries for it, as one immutable value.

What the service was given since the snapshot was built lies over it, where there is any. A request takes the current
serving once and keeps it to its last byte; the one that was replaced is closed by the
interpreter when its last request lets go. Knows nothing of HTTP or of batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from indexer.store.documents import StoredDocument
from indexer.store.filters import Filter
from indexer.store.fresh_log import Cursor
from indexer.store.overlay import Overlay
from indexer.store.snapshot import Snapshot
from models.errors import BadEncoder
from models.reader import TextReader
from models.spec import EncoderSpec, Side

if TYPE_CHECKING:
    from service.engine.device import VectorSearch

Mask = NDArray[np.bool_]
MEMORISED_FILTERS = 32
START = Cursor(0)


class Selection:
    """What some filters admit. Whoever searches takes the form that suits: the filters, or the rows.

    Compared by identity: a serving gives equal filters one selection.
    """

    def __init__(self, filters: tuple[Filter, ...], admit: Callable[[], Mask]) -> None:
        """`admit` computes the mask."""
        self.filters = filters
        self._admit = admit

    @cached_property
    def mask(self) -> Mask:
        """Over passage rows; computed when it is first asked for. Raises BadFilter."""
        return self._admit()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Serving:
    """Compared by identity: two openings of one version are two servings.

    `facets` and `select` are the snapshot's: `select(filters)` is what filters admit of it, remembered for the last few
    filters: equal ones get one Selection. `fresh` is what lies over it, and `cursor` how far the log was read.
    `opened` is what engines keep for the snapshot, by engine; all servings that are made of this one share it.
    """

    snapshot: Snapshot
    encoder: TextReader
    facets: dict[str, dict[str, int]]
    select: Callable[[tuple[Filter, ...]], Selection]
    fresh: Overlay | None = None
    cursor: Cursor = START
    opened: dict[object, VectorSearch] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return self.snapshot.version

    @property
    def state(self) -> bytes:
        """Names what lies over the snapshot: equal version, encoder and state, equal answers."""
        return b"" if self.fresh is None else self.fresh.state

    def allowed(self, filters: tuple[Filter, ...]) -> Mask:
        """Which of the snapshot's passage rows the filters admit; raises BadFilter."""
        if self.fresh is not None:
            self.fresh.allowed(filters)
        return self.select(self.snapshot_filters(filters)).mask

    def snapshot_filters(self, filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
        """The filters as the snapshot alone evaluates them: a field that only fresh documents have matches nothing."""
        return filters if self.fresh is None else self.fresh.snapshot_filters(filters)

    def documents_of(self, passages: NDArray[np.int64]) -> NDArray[np.int64]:
        """The document row of each passage row."""
        if self.fresh is None:
            return self.snapshot.passages.documents[passages].astype(np.int64)
        return self.fresh.documents_of(passages)

    def document(self, row: int) -> StoredDocument:
        return self.snapshot.documents.get(row) if self.fresh is None else self.fresh.document(row)

    def span(self, passage: int) -> tuple[int, int]:
        """First and last-plus-one character of a passage in its document's text."""
        return self.snapshot.passages.span(passage) if self.fresh is None else self.fresh.span(passage)

    def row_of(self, document_id: str) -> int | None:
        return self.snapshot.documents.row_of(document_id) if self.fresh is None else self.fresh.row_of(document_id)

    @property
    def fields(self) -> list[str]:
        """The metadata fields that some document has."""
        fresh = {} if self.fresh is None else self.fresh.kinds
        return sorted({*self.snapshot.metadata.fields, *fresh})

    @property
    def documents(self) -> int:
        """How many can be found."""
        return len(self.snapshot.documents) if self.fresh is None else self.fresh.documents

    @classmethod
    def open(cls, folder: Path, encoder: TextReader, *, verify: bool = True, searched: bool = True) -> Serving:
        """Opens a snapshot for this encoder; refuses one that is damaged or lives in another space.

        `searched`: by this process, which opens the index over the vectors.
        """
        snapshot = Snapshot.open(folder, verify=verify, searched=searched)
        snapshot.manifest.require_encoder(encoder.spec)

        @lru_cache(maxsize=MEMORISED_FILTERS)
        def select(filters: tuple[Filter, ...]) -> Selection:
            return Selection(filters, lambda: snapshot.metadata.select(filters)[snapshot.passages.documents])

        cursor = Cursor(snapshot.manifest.fresh.position)
        return cls(snapshot, encoder, snapshot.metadata.facets(), select, cursor=cursor)


def require_query_encoder(folder: Path) -> Path:
    """The folder, refused where its encoder cannot read queries."""
    if Side.QUERY not in EncoderSpec.load(folder).sides:
        raise BadEncoder(f"{folder} is an encoder of documents; set CARE_ENCODER to the folder of the query encoder")
    return folder


def is_same_function(folder: Path, encoder: TextReader) -> bool:
    """Whether the folder still holds what was loaded from it."""
    spec = EncoderSpec.load(folder)
    same_weights = spec.fingerprint(encoder.variant.filename) == encoder.fingerprint
    return same_weights and spec.query_instruction == encoder.spec.query_instruction
