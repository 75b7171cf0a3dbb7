"""Overlay of documents posted and deleted since a snapshot was built: one immutable value per state of the log.

Rows continue the snapshot's: the row of a fresh document is the snapshot's number of documents plus its own, and so for
passages. A posted or deleted document hides the snapshot's of the same id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, compress

import numpy as np

from indexer.store.arrays import Mask, Rows, Scores
from indexer.store.documents import StoredDocument
from indexer.store.filters import Filter, restrict
from indexer.store.fresh_log import Frame, Posted
from indexer.store.metadata import MetadataIndex, no_such_field
from indexer.store.snapshot import Snapshot
from models.lexical import Postings, Ranking

MEMORISED_FILTERS = 32
STATE_BYTES = 16
# The lowest score of a text that shares a word with the query.
SOME_WORD = float(np.nextafter(np.float32(0), np.float32(1)))


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A few documents as a small index, with rows of its own; `owners` is the document row of each passage."""

    ids: tuple[str, ...]
    documents: tuple[StoredDocument, ...]
    owners: Rows
    spans: Rows
    vectors: Scores
    postings: Postings
    metadata: MetadataIndex

    def __len__(self) -> int:
        """The number of passages."""
        return len(self.owners)

    @classmethod
    def of(cls, posted: Sequence[Posted], vectors: Scores) -> Block:
        """`vectors` (passages of all, dim) are searched instead of those that were posted."""
        spans = [span for document in posted for span in document.spans]
        # Words are counted over whole documents, as in the snapshot: the first passage has all of them.
        later = [[""] * (len(document.spans) - 1) for document in posted]
        texts = [text for one, rest in zip(posted, later, strict=True) for text in (f"{one.title}\n{one.text}", *rest)]
        return cls(
            tuple(document.id for document in posted),
            tuple(each.stored() for each in posted),
            np.repeat(np.arange(len(posted)), [len(document.spans) for document in posted]),
            np.array(spans, np.int64).reshape(-1, 2),
            vectors,
            Postings.of(texts),
            MetadataIndex.of([document.metadata for document in posted]),
        )

    @classmethod
    def joined(cls, blocks: Sequence[Block], live: Mask) -> Block:
        """Joins blocks, without the documents that `live` (documents of all,) leaves out."""
        owners = _shifted(blocks)
        kept = live[owners]
        documents = tuple(compress(chain.from_iterable(block.documents for block in blocks), live.tolist()))
        return cls(
            tuple(compress(chain.from_iterable(block.ids for block in blocks), live.tolist())),
            documents,
            (np.cumsum(live) - 1)[owners[kept]],
            np.concatenate([block.spans for block in blocks])[kept],
            np.concatenate([block.vectors for block in blocks])[kept],
            Postings.joined([block.postings for block in blocks], np.split(kept, np.cumsum([*map(len, blocks)])[:-1])),
            MetadataIndex.of([stored.metadata for stored in documents]),
        )

    def select(self, filters: Sequence[Filter], kinds: Mapping[str, str]) -> Mask:
        """Returns which passages' documents satisfy every filter; raises BadFilter if a value does not suit its field.

        `kinds` are the collection's: values of another kind match nothing.
        """
        own = self.metadata.kinds
        filters = restrict(filters, lambda field: field in own and own[field] == kinds.get(field))
        return self.metadata.select(filters)[self.owners]


class Overlay:
    """What the log holds beyond a snapshot; never changes.

    `hidden` is a boolean array over the snapshot's passages, `gone` the rows of their documents. `blocks` hold the
    fresh documents; `live` (fresh documents,) leaves out those replaced or deleted since, `rows` maps the ids of the
    live ones to rows, `positions` each changed id to the log's position. `kinds` are those of all fields that some
    visible document has. `state` identifies the log's content; `changes` counts documents posted and deleted, `posted`
    passages posted.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        """An empty overlay."""
        self.snapshot = snapshot
        self.hidden: Mask = np.zeros(len(snapshot.passages), np.bool_)
        self.gone: frozenset[int] = frozenset()
        self.live: Mask = np.ones(0, np.bool_)
        self.positions: dict[str, int] = {}
        self.state, self.changes, self.posted = b"", 0, 0
        self._set_blocks(())

    def apply(self, frames: Sequence[Frame]) -> Overlay:
        """Returns a new overlay with further frames of the log."""
        new, main = copy(self), self.snapshot
        changes = {change.id: change for frame in frames for change in frame.changes}
        new.hidden, new.live = self.hidden.copy(), self.live.copy()
        gone, replaced = self._rows_of(changes)
        new.gone = self.gone | gone
        for passages in map(main.passages.of, gone):
            new.hidden[passages.start : passages.stop] = True
        new.live[replaced] = False
        blocks = list(self.blocks)
        if posted := [change for change in changes.values() if isinstance(change, Posted)]:
            blocks.append(Block.of(posted, self._vectors(posted)))
            new.live = _merge(blocks, np.append(new.live, np.ones(len(posted), np.bool_)))
        new.positions = self.positions | {change.id: frame.position for frame in frames for change in frame.changes}
        for frame in frames:  # one by one: the state does not depend on how many are applied at once
            state = b"%b%d,%d" % (new.state, frame.position, frame.checksum)
            new.state = blake2b(state, digest_size=STATE_BYTES).digest()
            new.changes += len(frame.changes)
            new.posted += passages_of(frame)
        new._set_blocks(tuple(blocks))
        return new

    def _set_blocks(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        first = len(self.snapshot.documents)
        ids = enumerate(chain.from_iterable(block.ids for block in blocks), first)
        self.rows = {own: row for row, own in compress(ids, self.live.tolist())}
        documents = self._documents = tuple(chain.from_iterable(block.documents for block in blocks))
        owners = _shifted(blocks)
        self._owners, alive = owners + first, self.live[owners]
        self._spans = np.concatenate([np.empty((0, 2), np.int64), *(block.spans for block in blocks)])
        self.kinds = kinds = self.kinds_without(())

        @lru_cache(maxsize=MEMORISED_FILTERS)
        def allowed(filters: tuple[Filter, ...]) -> Mask:
            """Returns which fresh passages are live and satisfy the filters."""
            selected = [block.select(filters, kinds) for block in blocks] if filters else []
            return np.logical_and(alive, np.concatenate(selected)) if selected else alive

        @lru_cache(maxsize=MEMORISED_FILTERS)
        def columns(filters: tuple[Filter, ...]) -> MetadataIndex:
            """Returns the columns of the live fresh documents that satisfy the filters."""
            return MetadataIndex.of([documents[own].metadata for own in np.unique(owners[allowed(filters)]).tolist()])

        self.allowed, self.columns = allowed, columns

    @property
    def documents(self) -> int:
        """Returns how many documents can be found, the snapshot's included."""
        return len(self.snapshot.documents) - len(self.gone) + len(self.rows)

    @property
    def passages(self) -> int:
        visible = len(self.hidden) - int(np.count_nonzero(self.hidden))
        return visible + int(np.count_nonzero(self.allowed(())))

    @property
    def fields(self) -> list[str]:
        """The fields that filters and facets may name: the snapshot's, and those of fresh documents."""
        return sorted({*self.snapshot.metadata.fields, *self.kinds})

    def kinds_without(self, ids: Collection[str]) -> dict[str, str]:
        """Returns the kind of each field that some visible document has, without the documents of these ids.

        If documents differ, as they may after a rollback, the snapshot's kind counts, then that of the earliest post.
        """
        gone, replaced = self._rows_of(ids)
        live = self.live.copy()
        live[replaced] = False
        kinds, start = self.snapshot.metadata.kinds_without(np.array([*self.gone | gone], np.int64)), 0
        for block in self.blocks:
            dead = np.flatnonzero(~live[start : start + len(block.ids)])
            kinds = block.metadata.kinds_without(dead) | kinds
            start += len(block.ids)
        return kinds

    def snapshot_filters(self, filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
        """Returns the filters for the snapshot alone: a field or kind that only posted documents have matches nothing.

        Raises BadFilter if a field is neither the snapshot's nor a fresh document's.
        """
        if not filters:
            return filters
        main = self.snapshot.metadata

        def is_held(field: str) -> bool:
            kind = main.kinds.get(field)
            if kind is None and field not in self.kinds:
                examples = (each.example() for each in (main, *(block.metadata for block in self.blocks)))
                raise no_such_field(field, self.fields, next(filter(None, examples), ""))
            return kind is not None and kind == self.kinds.get(field, kind)

        return restrict(filters, is_held)

    def visible(self, passages: Rows, scores: Scores) -> Ranking:
        """Returns the snapshot's passages that are not hidden."""
        kept = ~self.hidden[passages]
        return passages[kept], scores[kept]

    def score_vectors(self, queries: Scores) -> Scores:
        """Computes inner products (queries, fresh passages) of `queries` (queries, dim)."""
        parts = [queries @ block.vectors.T for block in self.blocks]
        return np.concatenate([np.empty((len(queries), 0), np.float32), *parts], axis=1)

    def score_words(self, query: str) -> Scores:
        """Computes BM25 (fresh passages,) with the snapshot's term rarities, so that scores of both compare."""
        lexical = self.snapshot.lexical
        weights = lexical.weights(query)
        parts = [block.postings.score(weights, lexical) for block in self.blocks]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def pick(self, scores: Scores, filters: tuple[Filter, ...], least: float) -> Ranking:
        """Returns the fresh passages of at least this score (fresh passages,) that the filters admit, best first."""
        chosen = np.flatnonzero(self.allowed(filters) & (scores >= least))
        chosen = chosen[np.lexsort((chosen, -scores[chosen]))]
        return chosen + len(self.hidden), scores[chosen]

    def chosen(self, filters: tuple[Filter, ...]) -> Rows:
        """Returns the rows of the live fresh documents that satisfy the filters, ascending."""
        return np.unique(self._owners[self.allowed(filters)])

    def documents_of(self, passages: Rows) -> Rows:
        """Returns the document row of each passage row, fresh or not."""
        if not self.changes:  # 1.8 µs instead of 11.8 µs for 100 rows, three times a query
            return self.snapshot.passages.documents[passages].astype(np.int64)
        main = len(self.hidden)
        found = self.snapshot.passages.documents[np.minimum(passages, main - 1)].astype(np.int64)
        fresh = passages >= main
        found[fresh] = self._owners[passages[fresh] - main]
        return found

    def document(self, row: int) -> StoredDocument:
        """Returns the document of a row, fresh or not."""
        own = row - len(self.snapshot.documents)
        return self.snapshot.documents.get(row) if own < 0 else self._documents[own]

    def passages_of(self, document: int) -> Sequence[int]:
        """Returns the rows of a document's passages, fresh or not."""
        if document < len(self.snapshot.documents):
            return self.snapshot.passages.of(document)
        own: list[int] = (np.flatnonzero(self._owners == document) + len(self.hidden)).tolist()
        return own

    def span(self, passage: int) -> tuple[int, int]:
        """Returns the characters of a passage, fresh or not, in its document's text."""
        own = passage - len(self.hidden)
        if own < 0:
            return self.snapshot.passages.span(passage)
        start, end = self._spans[own].tolist()
        return start, end

    def row_of(self, document_id: str) -> int | None:
        """Returns the row of the document with this id; None if there is none, or it was deleted."""
        if (row := self.rows.get(document_id)) is not None:
            return row
        row = self.snapshot.documents.row_of(document_id)
        return None if row in self.gone else row

    def _rows_of(self, ids: Collection[str]) -> tuple[set[int], list[int]]:
        """Returns the snapshot's rows of these ids, and the places of the live fresh documents among all."""
        gone = {row for own in ids if (row := self.snapshot.documents.row_of(own)) is not None}
        first = len(self.snapshot.documents)
        return gone, [self.rows[own] - first for own in ids if own in self.rows]

    def _vectors(self, posted: Sequence[Posted]) -> Scores:
        """Returns vectors of all passages, corrected to the snapshot's encoder if it has a correction."""
        vectors: Scores = np.concatenate([document.vectors for document in posted]).astype(np.float32)
        facts, correction = self.snapshot.manifest.correction, self.snapshot.correction
        if facts is not None and correction is not None:
            known = np.repeat([each.encoder in facts.encoders for each in posted], [len(each.spans) for each in posted])
            vectors[known] = correction(vectors[known])
        return vectors


def passages_of(frame: Frame) -> int:
    """Returns how many passages a request posted."""
    return sum(len(change.spans) for change in frame.changes if isinstance(change, Posted))


def _shifted(blocks: Sequence[Block]) -> Rows:
    """Returns the owners of all passages, rows counted over all blocks."""
    starts = np.cumsum([0, *(len(block.ids) for block in blocks)]).tolist()
    owners = (block.owners + start for block, start in zip(blocks, starts, strict=False))
    return np.concatenate([np.empty(0, np.int64), *owners])


def _merge(blocks: list[Block], live: Mask) -> Mask:
    """Joins the last blocks while they are of similar size: few blocks to search, and few joins for each document."""
    while len(blocks) > 1 and len(blocks[-2]) <= 2 * len(blocks[-1]):
        documents = sum(len(block.ids) for block in blocks[-2:])
        blocks[-2:] = [Block.joined(blocks[-2:], live[-documents:])]
        live = np.append(live[:-documents], np.ones(len(blocks[-1].ids), np.bool_))
    return live
