"""A few documents as a small index: vectors, words, metadata and what a hit shows. Never changes.

Rows here count from 0 within the block. Knows nothing of logs or of the snapshot beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.store import Filter, Posted, StoredDocument
from indexer.store.filters import restrict
from indexer.store.metadata import MetadataIndex
from models.lexical import Postings

Mask = NDArray[np.bool_]
Scores = NDArray[np.float32]
Rows = NDArray[np.int64]


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
