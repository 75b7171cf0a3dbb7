"""Titles and texts of passages, read back from the documents on disk; nothing but one document is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from indexer.store.arrays import Array
from indexer.store.documents import Documents
from indexer.store.passages import Passages

BLOCK = 8192


def passage_texts(documents: Documents, passages: Passages, rows: Sequence[int] | Array) -> Iterator[tuple[str, str]]:
    """Title and text of the passages in ascending `rows`; a document is parsed once for all its passages."""
    at, title, text = -1, "", ""
    for start in range(0, len(rows), BLOCK):
        block = np.asarray(rows[start : start + BLOCK])
        for row, document_row in zip(block.tolist(), passages.documents[block].tolist(), strict=True):
            if document_row != at:
                document = documents.get(document_row)
                at, title, text = document_row, document.title, document.text
            first, end = passages.span(row)
            yield title, text[first:end]
