"""Writes one snapshot folder, stage by stage, the manifest last.

The order is documents, then vectors and lexical index in any order, then `finish`. After `close_documents` documents
are read back from disk, so no stage keeps the corpus in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import numpy as np
import orjson

from indexer.errors import NotWritten
from indexer.store.arrays import Array, ArrayWriter, BlobWriter, load_array
from indexer.store.columns import FieldKind
from indexer.store.documents import Documents, DocumentsWriter, Passages, PassagesWriter, Span, load_hashes
from indexer.store.files import DiskDict, sync
from indexer.store.filters import MAX_FIELDS, NUMBER, Metadata, has_value, kind_of, spell, split_number
from indexer.store.kinds import INDEX_FILE, VECTORS_FILE, IndexKind
from indexer.store.manifest import LEXICAL_FOLDER, Manifest, list_files
from indexer.store.metadata import FIELDS_FILE
from models.lexical import LexicalIndex

logger = logging.getLogger(__name__)

BLOCK = 1 << 18


class SnapshotWriter(AbstractContextManager["SnapshotWriter"]):
    """Writes one folder; a `with` closes the files of a failed build."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._documents = DocumentsWriter(folder, self._files)
        self._metadata = MetadataWriter(folder, self._files)
        self._passages = PassagesWriter(folder, self._files)
        self._count = 0

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(
        self, document_id: str, title: str, text: str, metadata: Metadata, spans: Sequence[Span], hashes: Array
    ) -> None:
        """Adds a document, the spans of its passages (at least one) and their content hashes."""
        self._documents.add(document_id, title, text, metadata)
        self._metadata.add(metadata)
        self._passages.add(self._count, spans, hashes)
        self._count += 1

    def close_documents(self) -> tuple[Documents, Passages, Array]:
        """Completes documents, metadata and passages; opens what was written, content hashes included."""
        documents = self._documents.close()
        self._metadata.close()
        passages, folder = self._passages.close(), self._folder
        return Documents.open(folder, documents), Passages.open(folder, passages), load_hashes(folder, passages)

    def write_vectors(self, blocks: Iterable[Array], dim: int, name: str = VECTORS_FILE) -> Array:
        """Writes `blocks` of vectors (any number, dim) float16 in row order; returns a map of them all."""
        with ArrayWriter(self._folder / name, "<f2", (dim,)) as writer:
            for block in blocks:
                writer.append(block)
            rows = writer.close()
        return load_array(self._folder / name, "<f2", (rows, dim))

    def write_index(self, vectors: Array, kind: IndexKind) -> dict[str, int]:
        """Builds the index over the vectors that were written; returns the build parameters."""
        from indexer.store.faiss_index import build_index  # a process that only writes documents loads no FAISS

        return build_index(vectors, kind, self._folder / INDEX_FILE)

    def write_lexical(self, texts: Iterable[str], first_rows: Iterable[int]) -> None:
        """Indexes `texts` of the documents in row order, each under the row of its first passage."""
        folder = self._folder / LEXICAL_FOLDER
        try:
            LexicalIndex.build(texts, folder, first_rows)
        except ValueError as error:  # whatever goes wrong inside the library
            raise NotWritten(folder, error) from error

    def finish(self, facts: Manifest) -> Manifest:
        """Flushes every file to the disk, then writes the manifest: from here on the snapshot exists."""
        # The lexical library makes some files readable by their owner alone; they get the mode of all the others.
        mode = (self._folder / VECTORS_FILE).stat().st_mode & 0o777
        for path in self._folder.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            sync(path)
        sync(self._folder)
        manifest = facts.model_copy(update={"files": list_files(self._folder)})
        manifest.write(self._folder)
        return manifest


class MetadataWriter:
    """Writes filter columns while documents stream by, under working names until all fields are known."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self._fields: dict[str, _Keywords | _Numbers] = {}
        self._left_out: set[str] = set()
        self._documents = 0

    def add(self, metadata: Metadata) -> None:
        """Adds the next document's metadata.

        A value of another kind than the field's first is in no column, nor is a field beyond the first MAX_FIELDS.
        """
        for name, value in metadata.items():
            if not has_value(value):
                continue
            number = kind_of(value) == NUMBER
            if name not in self._fields:
                if len(self._fields) == MAX_FIELDS:
                    self._left_out.add(name)
                    continue
                stem = self._folder / f"metadata-unsorted-{len(self._fields)}"
                self._fields[name] = _Numbers(stem, self._files) if number else _Keywords(stem, self._files)
            column = self._fields[name]
            if isinstance(column, _Numbers) == number:
                column.add(self._documents, value)
        self._documents += 1

    def close(self) -> None:
        """Completes the files."""
        if self._left_out:
            more = f"{len(self._left_out)} metadata fields, such as {min(self._left_out)}, come after the first"
            logger.warning("%s %d and cannot be filtered by; documents show them all the same", more, MAX_FIELDS)
        fields = []
        for position, (name, column) in enumerate(sorted(self._fields.items())):
            kind = column.write(self._folder, f"metadata.{position}", self._documents)
            fields.append({"name": name, "kind": kind})
        (self._folder / FIELDS_FILE).write_bytes(orjson.dumps(fields, option=orjson.OPT_INDENT_2))


class _Numbers:
    """A number a document, NaN if it has none; a file of rests only if an integer was rounded."""

    def __init__(self, stem: Path, files: ExitStack) -> None:
        self._paths = stem.with_suffix(".values.npy"), stem.with_suffix(".rests.npy")
        self._values = files.enter_context(ArrayWriter(self._paths[0], "<f8"))
        self._rests = files.enter_context(ArrayWriter(self._paths[1], "<i2"))
        self._exact = True

    def add(self, row: int, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"a number column was given {value!r}")
        self._pad(row)
        nearest, rest = split_number(value)
        self._values.append([nearest])
        self._rests.append([rest])
        self._exact &= not rest

    def write(self, folder: Path, stem: str, documents: int) -> FieldKind:
        self._pad(documents)
        self._values.close()
        self._rests.close()
        self._paths[0].rename(folder / f"{stem}.values.npy")
        if self._exact:
            self._paths[1].unlink()
        else:
            self._paths[1].rename(folder / f"{stem}.rests.npy")
        return FieldKind.NUMBER

    def _pad(self, rows: int) -> None:
        if missing := rows - len(self._values):
            self._values.append(np.full(missing, np.nan))
            self._rests.append(np.zeros(missing, np.int16))


class _Keywords:
    """Codes in order of first occurrence, and where each document's begin; write() maps them to final codes."""

    def __init__(self, stem: Path, files: ExitStack) -> None:
        self._files = files
        self._starts_path, self._codes_path = stem.with_suffix(".starts.npy"), stem.with_suffix(".codes.npy")
        self._starts = files.enter_context(ArrayWriter(self._starts_path, "<i8"))
        self._codes = files.enter_context(ArrayWriter(self._codes_path, "<i4"))
        self._vocabulary = files.enter_context(closing(DiskDict(stem.with_suffix(".vocabulary"))))
        self._values = 0
        self._lists = False

    def add(self, row: int, value: object) -> None:
        self._pad(row)
        self._starts.append([len(self._codes)])
        self._lists |= isinstance(value, list | tuple)
        texts = dict.fromkeys(value) if isinstance(value, list | tuple) else [value]
        codes = []
        for text in texts:
            codes.append(self._vocabulary.setdefault(spell(text), self._values))
            self._values += codes[-1] == self._values
        self._codes.append(codes)

    def write(self, folder: Path, stem: str, documents: int) -> FieldKind:
        self._pad(documents + 1)
        self._starts.close()
        final = np.empty(self._values, dtype=np.int32)
        blob = BlobWriter(folder, f"{stem}.vocabulary", self._files)
        for code, (text, first_code) in enumerate(self._vocabulary.sorted_items()):
            blob.append(text)
            final[first_code] = code
        blob.close()
        self._vocabulary.close()
        starts = load_array(self._starts_path, "<i8", (documents + 1,))
        codes = load_array(self._codes_path, "<i4", (self._codes.close(),))
        with ArrayWriter(folder / f"{stem}.codes.npy", "<i4") as column:
            for first in range(0, len(codes) if self._lists else documents, BLOCK):
                if self._lists:
                    column.append(final[codes[first : first + BLOCK]])
                else:  # one code a document, −1: none
                    bounds = starts[first : first + BLOCK + 1]
                    dense = np.full(len(bounds) - 1, -1, dtype=np.int32)
                    dense[bounds[1:] > bounds[:-1]] = final[codes[bounds[0] : bounds[-1]]]
                    column.append(dense)
            column.close()
        self._codes_path.unlink()
        if self._lists:
            self._starts_path.rename(folder / f"{stem}.starts.npy")
            return FieldKind.KEYWORDS
        self._starts_path.unlink()
        return FieldKind.KEYWORD

    def _pad(self, rows: int) -> None:
        """Lets documents without a value begin where the next begins."""
        if missing := rows - len(self._starts):
            self._starts.append(np.full(missing, len(self._codes)))
