"""Writes one snapshot folder, stage by stage, the manifest last. Knows nothing of corpora, encoders or versions.

The order is documents, then vectors and lexical index in any order, then `finish`. After `close_documents` the
documents can be read back from disk, so that no stage has to keep the corpus in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from indexer.store.arrays import Array
from indexer.store.documents import Documents, DocumentsWriter, Metadata
from indexer.store.manifest import Facts, Manifest, list_files
from indexer.store.metadata import MetadataWriter
from indexer.store.passages import Passages, PassagesWriter, Span, save_hashes
from indexer.store.snapshot import LEXICAL_FOLDER
from indexer.store.vectors import INDEX_FILE, VECTORS_FILE, IndexKind, build_index
from models.lexical import LexicalIndex


class SnapshotWriter:
    """One folder in the making; used in a `with`, so that a failed build leaves no file open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._documents = DocumentsWriter(folder)
        self._metadata = MetadataWriter(folder)
        self._passages = PassagesWriter(folder)
        self._count = 0

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._documents.release()

    def add(self, document_id: str, title: str, text: str, metadata: Metadata, spans: Sequence[Span]) -> None:
        """The next document and the spans of its text that are its passages, at least one."""
        self._documents.add(document_id, title, text, metadata)
        self._metadata.add(metadata)
        self._passages.add(self._count, spans)
        self._count += 1

    def close_documents(self) -> tuple[Documents, Passages]:
        """Completes documents, metadata and passages on disk, and opens what was written."""
        documents = self._documents.close()
        self._metadata.close()
        passages = self._passages.close()
        return Documents.open(self._folder, documents), Passages.open(self._folder, passages)

    def create_vectors(self, passages: int, dim: int) -> NDArray[np.float16]:
        """An array (passages, dim) on disk, to be filled."""
        shape = (passages, dim)
        return np.lib.format.open_memmap(self._folder / VECTORS_FILE, mode="w+", dtype="<f2", shape=shape)

    def write_hashes(self, hashes: Array) -> None:
        """`hashes` (passages, 16) uint8."""
        save_hashes(self._folder, hashes)

    def write_index(self, vectors: NDArray[np.float16], kind: IndexKind) -> None:
        build_index(vectors, kind, self._folder / INDEX_FILE)

    def write_lexical(self, texts: Iterable[str]) -> None:
        """`texts` in passage-row order."""
        LexicalIndex.build(texts, self._folder / LEXICAL_FOLDER)

    def finish(self, facts: Facts) -> Manifest:
        """Flushes every file to the disk, then writes the manifest: from here on the snapshot exists."""
        # The lexical library makes some files readable by their owner alone; they get the mode of all the others.
        mode = (self._folder / VECTORS_FILE).stat().st_mode & 0o777
        for path in self._folder.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            sync(path)
        sync(self._folder)
        manifest = Manifest(**dict(facts), files=list_files(self._folder))
        manifest.write(self._folder)
        sync(self._folder)
        return manifest


def sync(path: Path) -> None:
    """Returns when the file or folder is on the disk, not only in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
