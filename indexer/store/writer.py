"""Writes one snapshot folder, stage by stage, the manifest last. Knows nothing of corpora, encoders or versions.

The order is documents, then vectors and lexical index in any order, then `finish`. After `close_documents` the
documents can be read back from disk, so that no stage has to keep the corpus in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import orjson

from indexer.store.arrays import Array, ArrayWriter, load_array
from indexer.store.documents import Documents, DocumentsWriter, Metadata
from indexer.store.errors import NotWritten
from indexer.store.kinds import INDEX_FILE, VECTORS_FILE, IndexKind
from indexer.store.manifest import CORRECTION_FILE, LEXICAL_FOLDER, Facts, Manifest, list_files
from indexer.store.metadata_writer import MetadataWriter
from indexer.store.passages import Passages, PassagesWriter, Span, load_hashes
from models.lexical import LexicalIndex

WITHDRAWN_FILE = "withdrawn.json"


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
        for writer in (self._documents, self._metadata, self._passages):
            writer.release()

    def add(
        self, document_id: str, title: str, text: str, metadata: Metadata, spans: Sequence[Span], hashes: Array
    ) -> None:
        """The next document, the spans of its text that are its passages, at least one, and their content hashes."""
        self._documents.add(document_id, title, text, metadata)
        self._metadata.add(metadata)
        self._passages.add(self._count, spans, hashes)
        self._count += 1

    def close_documents(self) -> tuple[Documents, Passages, Array]:
        """Completes documents, metadata and passages on disk; opens what was written, content hashes included."""
        documents = self._documents.close()
        self._metadata.close()
        passages = self._passages.close()
        folder = self._folder
        return Documents.open(folder, documents), Passages.open(folder, passages), load_hashes(folder, passages)

    def write_vectors(self, blocks: Iterable[Array], dim: int) -> Array:
        """`blocks` of vectors (any number, dim) float16 in passage-row order; returns a map of them all."""
        with ArrayWriter(self._folder / VECTORS_FILE, "<f2", (dim,)) as writer:
            for block in blocks:
                writer.append(block)
            passages = writer.close()
        return load_array(self._folder / VECTORS_FILE, "<f2", (passages, dim))

    def write_index(self, vectors: Array, kind: IndexKind) -> dict[str, int]:
        """The index over the vectors that were written; returns the parameters that made it."""
        from indexer.store.faiss_index import build_index  # who only reads documents needs no FAISS

        return build_index(vectors, kind, self._folder / INDEX_FILE)

    def write_lexical(self, texts: Iterable[str]) -> None:
        """`texts` in passage-row order."""
        folder = self._folder / LEXICAL_FOLDER
        try:
            LexicalIndex.build(texts, folder)
        except ValueError as error:  # whatever goes wrong inside the library
            raise NotWritten(folder, error) from error

    def write_correction(self, parts: Iterable[Array], dim: int) -> None:
        """The query encoder's vectors (passages, dim) of the passages in `sample_rows`."""
        with ArrayWriter(self._folder / CORRECTION_FILE, "<f2", (dim,)) as writer:
            for vectors in parts:
                writer.append(vectors)
            writer.close()

    def write_withdrawn(self, ids: Sequence[str]) -> None:
        """Ids that the corpus has and the snapshot must not; no file where there are none."""
        if ids:
            (self._folder / WITHDRAWN_FILE).write_bytes(orjson.dumps(ids))

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
