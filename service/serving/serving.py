"""A serving, from which requests are answered: a snapshot, its query encoder, and the documents posted since.

A request takes the current serving once and keeps it to its last byte, so no answer mixes versions. `within` are the
fixed filters of the request's key: names, values and numbers of documents that they leave out appear nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from indexer.store.arrays import Mask
from indexer.store.filters import (
    MAX_FIELDS,
    NUMBER,
    TEXT,
    AnyOf,
    Filter,
    fields_of,
    kind_of,
    restrict,
    spell_all,
    suits,
)
from indexer.store.fresh_log import Cursor
from indexer.store.metadata import FACET_VALUES, MetadataIndex, admits, no_such_field
from indexer.store.overlay import MEMORISED_FILTERS, Overlay
from indexer.store.snapshot import Snapshot
from models.encoder.pairs import PairReader, RerankerSpec
from models.encoder.spec import EncoderSpec, Side
from models.encoder.tokenizer import TextReader
from models.errors import BadEncoder
from service.errors import NotReady

START = Cursor(0)
NOTHING: tuple[Filter, ...] = (AnyOf("", ()),)
"""Filters that no document satisfies."""


class Selection:
    """What some filters admit: as filters for a database, or as a mask over passage rows.

    Compared by identity: a serving gives equal filters one selection.
    """

    def __init__(self, filters: tuple[Filter, ...], admit: Callable[[], Mask]) -> None:
        """`admit` computes the mask."""
        self.filters = filters
        self._admit = admit

    @cached_property
    def mask(self) -> Mask:
        """The mask, computed on first use; raises BadFilter."""
        return self._admit()


class Models(NamedTuple):
    """The encoder that reads queries, and the reranker if there is one; without weights if another process computes."""

    encoder: TextReader
    reranker: PairReader | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Serving:
    """One immutable state of what is served. Compared by identity: two openings of one version are two servings.

    `facets` and `select` are those of the snapshot alone. `overlay` joins the snapshot and the documents posted and
    deleted since, read from the log up to `cursor`.
    """

    snapshot: Snapshot
    encoder: TextReader
    facets: dict[str, dict[str, int]]
    select: Callable[[tuple[Filter, ...]], Selection]
    overlay: Overlay
    cursor: Cursor = START
    reranker: PairReader | None = None

    @property
    def fresh(self) -> Overlay | None:
        """The overlay, None while nothing was posted or deleted: the engine then skips its steps."""
        return self.overlay if self.overlay.changes else None

    @property
    def version(self) -> str:
        return self.snapshot.version

    @property
    def name(self) -> tuple[str, str, str]:
        """The snapshot's version and the fingerprints of encoder and reranker, by which two processes agree on it."""
        return self.version, self.encoder.fingerprint, "" if self.reranker is None else self.reranker.fingerprint

    def allowed(self, filters: tuple[Filter, ...]) -> Mask:
        """Returns which of the snapshot's passage rows the filters admit; raises BadFilter."""
        self.overlay.allowed(filters)
        return self.select(self.overlay.snapshot_filters(filters)).mask

    def row_within(self, document_id: str, within: tuple[Filter, ...]) -> int | None:
        """Returns the row of a document that the filters admit; None if there is none."""
        row = self.overlay.row_of(document_id)
        return row if row is None or not within or admits(within, self.overlay.document(row).metadata) else None

    def fix(self, filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
        """Returns a key's filters in a form that this serving can evaluate.

        They match nothing if the snapshot may lack a column for one of their fields: without it, the documents to
        leave out cannot be found.
        """
        if not filters:
            return filters
        columns = self.snapshot.metadata.fields
        if len(columns) >= MAX_FIELDS and not fields_of(filters) <= {*columns}:
            return NOTHING
        return self.evaluable(filters)

    def evaluable(self, filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
        """Returns the filters without what would raise BadFilter: its message may show another tenant's value.

        A field that no document has matches nothing. A value of another kind than its field leaves out everything.
        """
        kinds = self.snapshot.metadata.kinds | self.overlay.kinds
        return restrict(filters, kinds.__contains__) if suits(filters, kinds) else NOTHING

    def require_filters(self, filters: tuple[Filter, ...], within: tuple[Filter, ...]) -> None:
        """Raises BadFilter if a filter names what no document within has; its message names only what they have."""
        columns, fields, kinds = self.columns(within), self.fields(within), self.overlay.kinds
        example = next(filter(None, (metadata.example() for metadata in columns)), "")
        for metadata in columns:
            own = metadata.kinds

            def is_held(field: str, own: Mapping[str, str] = own) -> bool:
                if field not in fields:
                    raise no_such_field(field, fields, example)
                return field in own and own[field] == kinds.get(field, own[field])

            metadata.select(restrict(filters, is_held))

    def columns(self, within: tuple[Filter, ...] = ()) -> tuple[MetadataIndex, ...]:
        """Returns the metadata of the snapshot and of the documents posted since."""
        if not within:
            return self.snapshot.metadata, *(block.metadata for block in self.overlay.blocks)
        return self.snapshot.metadata.part(self.overlay.snapshot_filters(within)), self.overlay.columns(within)

    def fields(self, within: tuple[Filter, ...] = ()) -> list[str]:
        """Returns the metadata fields that filters and facets may name."""
        if not within:
            return self.overlay.fields
        return sorted({name for metadata in self.columns(within) for name in metadata.fields})

    def rows(self, within: tuple[Filter, ...]) -> Mask:
        """Returns which document rows of the snapshot can be found."""
        rows = self.snapshot.metadata.select(self.overlay.snapshot_filters(within))
        rows[list(self.overlay.gone)] = False
        return rows

    def documents(self, within: tuple[Filter, ...] = ()) -> int:
        """Returns how many documents can be found."""
        if not within:
            return self.overlay.documents
        return int(np.count_nonzero(self.rows(within))) + len(self.overlay.chosen(within))

    def passages(self, within: tuple[Filter, ...] = ()) -> int:
        """Returns how many passages can be found."""
        if not within:
            return self.overlay.passages
        return int(np.count_nonzero(self.allowed(within) & ~self.overlay.hidden)) + self.fresh_passages(within)

    def fresh_passages(self, within: tuple[Filter, ...]) -> int:
        return int(np.count_nonzero(self.overlay.allowed(within)))

    @classmethod
    def open(
        cls, folder: Path, encoder: TextReader, reranker: PairReader | None = None, *, verify: bool = True,
        searched: bool = True,
    ) -> Serving:  # fmt: skip
        """Opens a snapshot for this encoder; refuses a damaged one or one of another embedding space.

        `searched`: whether this process searches, and so opens the index over the vectors.
        """
        snapshot = Snapshot.open(folder, verify=verify, searched=searched)
        snapshot.manifest.require_encoder(encoder.spec)

        @lru_cache(maxsize=MEMORISED_FILTERS)
        def select(filters: tuple[Filter, ...]) -> Selection:
            return Selection(filters, lambda: snapshot.metadata.select(filters)[snapshot.passages.documents])

        cursor = Cursor(snapshot.manifest.fresh.position)
        return cls(snapshot, encoder, snapshot.metadata.facets(), select, Overlay(snapshot), cursor, reranker)


class Current:
    """The serving that new requests get, None while `missing` says why there is none; `updates.swap` replaces it."""

    def __init__(self) -> None:
        self.serving: Serving | None = None
        self.missing = "none is published; care index build makes one"

    def __call__(self) -> Serving:
        if self.serving is None:
            raise NotReady(f"no snapshot is served: {self.missing}")
        return self.serving


def require_query_encoder(folder: Path) -> Path:
    """Returns the folder; refuses one whose encoder cannot read queries."""
    if Side.QUERY not in EncoderSpec.load(folder).sides:
        raise BadEncoder(f"{folder} is an encoder of documents; set CARE_ENCODER to the folder of the query encoder")
    return folder


def are_current(models: Models, encoder: Path, reranker: Path | None) -> bool:
    """Returns whether the folders still hold the models that were loaded from them.

    The whole spec counts. The fingerprint names how documents are read, and leaves out the address of a server, the
    query instruction and the trust in the encoder.
    """
    if EncoderSpec.load(encoder) != models.encoder.spec:
        return False
    return reranker is None or (models.reranker is not None and RerankerSpec.load(reranker) == models.reranker.spec)


def count_facets(serving: Serving, within: tuple[Filter, ...] = ()) -> dict[str, dict[str, int]]:
    """Counts documents by value for each field of few distinct texts, the most frequent first."""
    main = serving.columns(within)[0]
    known = main.facets() if within else serving.facets
    if serving.fresh is None:
        return known
    texts = {name for name, kind in serving.overlay.kinds.items() if kind == TEXT}
    counted = {name: Counter(counts) for name, counts in known.items() if name in texts}
    # A field with too many values in the snapshot is not a facet, even if posted documents have few of them.
    crowded = {name for name, kind in main.kinds.items() if kind == TEXT} - set(known)
    gone = np.array(sorted(serving.overlay.gone), np.int64)
    if within:
        gone = gone[serving.snapshot.metadata.select(serving.overlay.snapshot_filters(within))[gone]]
    for row in gone.tolist():
        for name, value in _texts(serving.snapshot.documents.get(row).metadata):
            if name in counted:
                counted[name][value] -= 1
    for row in serving.overlay.chosen(within).tolist():
        for name, value in _texts(serving.overlay.document(row).metadata):
            if name in texts and name not in crowded:
                counted.setdefault(name, Counter())[value] += 1
    present = {name: {value: count for value, count in each.items() if count} for name, each in counted.items()}
    return {name: _sorted(counts) for name, counts in sorted(present.items()) if 0 < len(counts) <= FACET_VALUES}


def count_values(serving: Serving, rows: Iterable[int], fields: Sequence[str]) -> dict[str, dict[str, int]]:
    """Counts the most frequent values of each field among these document rows; numbers as in JSON, 5.0 as 5."""
    counted: dict[str, Counter[str]] = {field: Counter() for field in fields}
    for row in rows:
        metadata = serving.overlay.document(row).metadata
        for field, counts in counted.items():
            value = metadata.get(field)
            is_text = value is None or kind_of(value) == TEXT
            counts.update(set(spell_all(value)) if is_text else [orjson.dumps(value).decode().removesuffix(".0")])
    return {field: _sorted(counts, FACET_VALUES) for field, counts in counted.items()}


def number_ranges(serving: Serving, within: tuple[Filter, ...] = ()) -> dict[str, tuple[float, float]]:
    """Returns the least and the greatest value of each field of numbers, replaced and deleted documents included."""
    found: dict[str, tuple[float, float]] = {}
    for metadata in serving.columns(within):
        for name, (low, high) in metadata.ranges.items():
            if serving.overlay.kinds.get(name) != NUMBER:
                continue
            known = found.get(name, (low, high))
            found[name] = min(low, known[0]), max(high, known[1])
    return found


def _sorted(counts: Mapping[str, int], most: int | None = None) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:most])


def _texts(metadata: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in metadata.items():
        if kind_of(value) == TEXT:
            yield from ((name, text) for text in dict.fromkeys(spell_all(value)))
