"""What was posted and deleted since a snapshot was built, laid over it: one immutable value, one state of the log.

Rows go on where the snapshot's end: the document row of a fresh document is the snapshot's number of documents plus its
own, and so for passages. A posted document hides the snapshot's of the same id, a deleted one hides it too. Knows
nothing of files, engines or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from indexer.store.arrays import Mask, Rows, Scores
from indexer.store.documents import StoredDocument
from indexer.store.filters import Filter, restrict
from indexer.store.fresh_log import Frame, Posted
from indexer.store.metadata import MetadataIndex
from indexer.store.snapshot import Snapshot
from models.lexical import Ranking
from models.postings import Postings


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """`owners` (passages,) is the document row of each passage, `spans` (passages, 2) its characters of the text,
    `vectors` (passages, dim) its embedding."""

    ids: tuple[str, ...]
    documents: tuple[StoredDocument, ...]
    owners: Rows
    spans: Rows
    vectors: Scores
    postings: Postings
    metadata: MetadataIndex

    def __len__(self) -> int:
        """Passages."""
        return len(self.owners)

    @classmethod
    def of(cls, posted: Sequence[Posted], vectors: Scores) -> Block:
        """`vectors` (passages of all, dim) are searched in the place of those that were posted."""
        spans = [span for document in posted for span in document.spans]
        texts = [f"{document.title}\n{document.text[slice(*span)]}" for document in posted for span in document.spans]
        return cls(
            tuple(document.id for document in posted),
            tuple(StoredDocument.of(each.id, each.title, each.text, each.metadata) for each in posted),
            np.repeat(np.arange(len(posted)), [len(document.spans) for document in posted]),
            np.array(spans, np.int64).reshape(-1, 2),
            vectors,
            Postings.of(texts),
            MetadataIndex.of([document.metadata for document in posted]),
        )

    @classmethod
    def joined(cls, blocks: Sequence[Block], live: Sequence[Mask]) -> Block:
        """The live documents of all, one block after the other; `live` is a boolean array over those of each."""
        kept = [mask[block.owners] for block, mask in zip(blocks, live, strict=True)]
        documents = [
            (identity, stored)
            for block, mask in zip(blocks, live, strict=True)
            for identity, stored, lives in zip(block.ids, block.documents, mask.tolist(), strict=True)
            if lives
        ]
        starts = np.cumsum([0, *(np.count_nonzero(mask) for mask in live)]).tolist()
        owners = [
            (np.cumsum(mask) - 1)[block.owners[own]] + start
            for block, mask, own, start in zip(blocks, live, kept, starts, strict=False)
        ]
        return cls(
            tuple(identity for identity, _ in documents),
            tuple(stored for _, stored in documents),
            np.concatenate(owners),
            np.concatenate([block.spans[own] for block, own in zip(blocks, kept, strict=True)]),
            np.concatenate([block.vectors[own] for block, own in zip(blocks, kept, strict=True)]),
            Postings.joined([block.postings for block in blocks], kept),
            MetadataIndex.of([stored.metadata for _, stored in documents]),
        )

    def select(self, filters: Sequence[Filter]) -> Mask:
        """Which passages' documents satisfy every filter; raises BadFilter where a value does not suit its field."""
        return self.metadata.select(restrict(filters, self.metadata.kinds.__contains__))[self.owners]


MEMORISED_FILTERS = 32
STATE_BYTES = 16
Allowed = Callable[[tuple[Filter, ...]], Mask]


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """`hidden` is a boolean array over the snapshot's passages, `gone` the document rows that they belong to.

    `blocks` hold the fresh documents, `live` says of each block which are not replaced or deleted since, `rows` has the
    row of each live one by id, `positions` the log's position of the last change of each id. `state` names what was
    laid over; `changes` counts documents posted and deleted, `posted` passages posted.
    """

    snapshot: Snapshot
    hidden: Mask
    gone: frozenset[int]
    blocks: tuple[Block, ...]
    live: tuple[Mask, ...]
    rows: dict[str, int]
    owners: Rows
    allowed: Allowed
    state: bytes
    changes: int
    posted: int
    positions: dict[str, int]

    @classmethod
    def over(cls, snapshot: Snapshot) -> Overlay:
        """Nothing, over a snapshot."""
        hidden = np.zeros(len(snapshot.passages), np.bool_)
        return cls._of(snapshot, hidden, frozenset(), [], [], b"", 0, 0, {})

    def apply(self, frames: Sequence[Frame]) -> Overlay:
        """This overlay, and what further frames of the log say. Takes time with their size, seldom with its own."""
        changes = {change.id: change for frame in frames for change in frame.changes}
        hidden, gone = self.hidden.copy(), set(self.gone)
        live = [mask.copy() for mask in self.live]
        places = {row: place for place, row in self._places()}
        for document_id in changes:
            if (row := self.snapshot.documents.row_of(document_id)) is not None:
                gone.add(row)
                passages = self.snapshot.passages.of(row)
                hidden[passages.start : passages.stop] = True
            if (row := self.rows.get(document_id)) is not None:
                block, own = places[row]
                live[block][own] = False
        blocks = list(self.blocks)
        if posted := [change for change in changes.values() if isinstance(change, Posted)]:
            blocks.append(Block.of(posted, self._vectors(posted)))
            live.append(np.ones(len(posted), np.bool_))
            _merge(blocks, live)
        state = self.state
        for frame in frames:  # one by one, so that it does not matter how many were taken in at once
            state = blake2b(b"%b%d,%d" % (state, frame.position, frame.checksum), digest_size=STATE_BYTES).digest()
        count = self.changes + sum(len(frame.changes) for frame in frames)
        posted_passages = self.posted + sum(map(passages_of, frames))
        positions = self.positions | {change.id: frame.position for frame in frames for change in frame.changes}
        return self._of(self.snapshot, hidden, frozenset(gone), blocks, live, state, count, posted_passages, positions)

    @classmethod
    def _of(
        cls,
        snapshot: Snapshot,
        hidden: Mask,
        gone: frozenset[int],
        blocks: Sequence[Block],
        live: Sequence[Mask],
        state: bytes,
        changes: int,
        posted: int,
        positions: dict[str, int],
    ) -> Overlay:
        first = len(snapshot.documents)
        starts = np.cumsum([first, *(len(block.ids) for block in blocks)]).tolist()
        owners = np.concatenate(
            [np.empty(0, np.int64), *(b.owners + start for b, start in zip(blocks, starts, strict=False))]
        )
        alive = np.concatenate([np.ones(0, np.bool_), *(m[b.owners] for b, m in zip(blocks, live, strict=True))])
        ids = chain.from_iterable(block.ids for block in blocks)
        lives = chain.from_iterable(mask.tolist() for mask in live)
        rows = {own: row for row, (own, is_live) in enumerate(zip(ids, lives, strict=True), first) if is_live}

        @lru_cache(maxsize=MEMORISED_FILTERS)
        def allowed(filters: tuple[Filter, ...]) -> Mask:
            if not filters:
                return alive
            selected: Mask = np.concatenate([np.ones(0, np.bool_), *(block.select(filters) for block in blocks)])
            return alive & selected

        counts = (state, changes, posted, positions)
        return cls(snapshot, hidden, gone, tuple(blocks), tuple(live), rows, owners, allowed, *counts)

    @property
    def documents(self) -> int:
        """How many there are to be found, the snapshot's included."""
        return len(self.snapshot.documents) - len(self.gone) + len(self.rows)

    @property
    def passages(self) -> int:
        visible = len(self.hidden) - int(np.count_nonzero(self.hidden))
        return visible + int(np.count_nonzero(self.allowed(())))

    @property
    def kinds(self) -> dict[str, str]:
        """What the fields of fresh documents hold."""
        return {name: kind for block in self.blocks for name, kind in block.metadata.kinds.items()}

    def snapshot_filters(self, filters: tuple[Filter, ...]) -> tuple[Filter, ...]:
        """See Serving. A field that no document has stays: evaluating it raises BadFilter."""
        if not filters:
            return filters
        only_fresh = self.kinds.keys() - self.snapshot.metadata.fields
        return restrict(filters, lambda field: field not in only_fresh)

    def visible(self, passages: Rows, scores: Scores) -> Ranking:
        """The snapshot's passages that nothing hides."""
        kept = ~self.hidden[passages]
        return passages[kept], scores[kept]

    def score_vectors(self, queries: Scores) -> Scores:
        """Inner products (queries, fresh passages) of `queries` (queries, dim)."""
        parts = [queries @ block.vectors.T for block in self.blocks]
        return np.concatenate([np.empty((len(queries), 0), np.float32), *parts], axis=1)

    def score_words(self, query: str) -> Scores:
        """BM25 (fresh passages,), by the rarities of the snapshot's lexical index, so that scores of both compare."""
        lexical = self.snapshot.lexical
        weights = lexical.weights(query)
        parts = [block.postings.score(weights, lexical) for block in self.blocks]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def pick(self, scores: Scores, filters: tuple[Filter, ...], least: float) -> Ranking:
        """The fresh passages of at least this score (fresh passages,) that the filters admit, best first."""
        chosen = np.flatnonzero(self.allowed(filters) & (scores >= least))
        chosen = chosen[np.lexsort((chosen, -scores[chosen]))]
        return chosen + len(self.hidden), scores[chosen]

    def documents_of(self, passages: NDArray[np.int64]) -> Rows:
        """The document row of each passage row, fresh or not."""
        main = len(self.hidden)
        found = self.snapshot.passages.documents[np.minimum(passages, main - 1)].astype(np.int64)
        fresh = passages >= main
        found[fresh] = self.owners[passages[fresh] - main]
        return found

    def document(self, row: int) -> StoredDocument:
        """The document of a row, fresh or not."""
        return self.snapshot.documents.get(row) if row < len(self.snapshot.documents) else self._fresh(row)

    def span(self, passage: int) -> tuple[int, int]:
        """Where a passage, fresh or not, stands in its document's text."""
        own = passage - len(self.hidden)
        if own < 0:
            return self.snapshot.passages.span(passage)
        for block in self.blocks:
            if own < len(block):
                start, end = block.spans[own].tolist()
                return start, end
            own -= len(block)
        raise IndexError(passage)

    def row_of(self, document_id: str) -> int | None:
        """The row of the document with this id, None where there is none, or none any more."""
        if (row := self.rows.get(document_id)) is not None:
            return row
        row = self.snapshot.documents.row_of(document_id)
        return None if row in self.gone else row

    def _vectors(self, posted: Sequence[Posted]) -> Scores:
        """Vectors of all passages where the snapshot's encoder would have put them, as far as the snapshot can tell."""
        vectors: Scores = np.concatenate([document.vectors for document in posted]).astype(np.float32)
        facts, correction = self.snapshot.manifest.correction, self.snapshot.correction
        if facts is not None and correction is not None:
            known = np.repeat([each.encoder in facts.encoders for each in posted], [len(each.spans) for each in posted])
            vectors[known] = correction(vectors[known])
        return vectors

    def _fresh(self, row: int) -> StoredDocument:
        own = row - len(self.snapshot.documents)
        for block in self.blocks:
            if own < len(block.ids):
                return block.documents[own]
            own -= len(block.ids)
        raise IndexError(row)

    def _places(self) -> list[tuple[tuple[int, int], int]]:
        """Block, place in it, and row of every fresh document."""
        places = ((number, own) for number, block in enumerate(self.blocks) for own in range(len(block.ids)))
        return [(place, row) for row, place in enumerate(places, len(self.snapshot.documents))]


def passages_of(frame: Frame) -> int:
    """How many passages were posted by a request."""
    return sum(len(change.spans) for change in frame.changes if isinstance(change, Posted))


def _merge(blocks: list[Block], live: list[Mask]) -> None:
    """Joins the last blocks while they are of like size: few blocks to search, and a document is joined but seldom."""
    while len(blocks) > 1 and len(blocks[-2]) <= 2 * len(blocks[-1]):
        blocks[-2:] = [Block.joined(blocks[-2:], live[-2:])]
        live[-2:] = [np.ones(len(blocks[-1].ids), np.bool_)]
