"""The documents of a snapshot, kept as the JSON that an answer needs, so that a hit is two slices of a map.

Files: `documents.bin` + `documents.offsets.npy` (two runs a document: the inside of its JSON object without text, and
the JSON string of its text), `documents.digests.npy` (what tells whether a document changed), `ids.hashes.npy` +
`ids.rows.npy` (id → document row). Knows nothing of passages, vectors or filters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from indexer.store.arrays import Array, ArrayWriter, Blob, BlobWriter, load_array, part_bits, rows_of_part
from indexer.store.filters import Metadata

DOCUMENTS_FILES = ("documents.bin", "documents.offsets.npy")
DIGESTS_FILE = "documents.digests.npy"
ID_HASHES_FILE, ID_ROWS_FILE = "ids.hashes.npy", "ids.rows.npy"
# What two versions are compared by.
COMPARED_FILES = (DIGESTS_FILE, ID_HASHES_FILE, ID_ROWS_FILE)
DIGEST_BYTES = 16
# How much of its text stands for the title of a document that has none.
HEADLINE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One document; `json` and `text_json` are ready to be written, the rest is parsed when asked for."""

    json: bytes
    text_json: bytes

    @classmethod
    def of(cls, document_id: str, title: str, text: str, metadata: Metadata) -> StoredDocument:
        inside = orjson.dumps({"id": document_id, "title": title, "metadata": metadata})[1:-1]
        return cls(inside, orjson.dumps(text))

    @property
    def id(self) -> str:
        return str(self._fields()["id"])

    @property
    def title(self) -> str:
        return str(self._fields()["title"])

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self._fields()["metadata"])

    @property
    def text(self) -> str:
        return str(orjson.loads(self.text_json))

    @property
    def headline(self) -> str:
        """The title, or the beginning of the text, cut between words, if there is none."""
        if title := self.title.strip():
            return title
        begin = " ".join(self.text[: 4 * HEADLINE_CHARACTERS].split())
        cut = re.sub(r"\s\S{,15}$", "", begin[:HEADLINE_CHARACTERS])
        return begin if len(begin) <= HEADLINE_CHARACTERS else f"{cut}…"

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = orjson.loads(b"{" + self.json + b"}")
        return fields


class DocumentsWriter:
    """Streams documents to disk; keeps nothing of them in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blob = BlobWriter(folder, "documents")
        self._digests = ArrayWriter(folder / DIGESTS_FILE, "|u1", (DIGEST_BYTES,))
        self._unsorted = ArrayWriter(folder / "ids.unsorted.npy", "<u8")

    def add(self, document_id: str, title: str, text: str, metadata: Metadata) -> None:
        stored = StoredDocument.of(document_id, title, text, metadata)
        self._blob.append(stored.json, stored.text_json)
        self._digests.append(_digest(stored.json, stored.text_json))
        self._unsorted.append([_hash(document_id)])

    def release(self) -> None:
        """Gives up the open files of a build that failed."""
        self._blob.release()
        self._digests.release()
        self._unsorted.release()

    def close(self) -> int:
        """Completes the files; returns the number of documents."""
        self._blob.close()
        self._digests.close()
        documents = self._unsorted.close()
        unsorted = self._folder / "ids.unsorted.npy"
        _write_sorted(self._folder, load_array(unsorted, "<u8", (documents,)))
        unsorted.unlink()
        return documents


def _write_sorted(folder: Path, hashes: Array) -> None:
    """`ids.hashes.npy`, ascending, and `ids.rows.npy`."""
    bits = part_bits(len(hashes))
    with (
        ArrayWriter(folder / ID_HASHES_FILE, "<u8") as ascending,
        ArrayWriter(folder / ID_ROWS_FILE, "<i4") as rows,
    ):
        for part in range(1 << bits):
            inside = rows_of_part(hashes, bits, part)
            order = inside[np.argsort(hashes[inside], kind="stable")]
            ascending.append(hashes[order])
            rows.append(order)
        ascending.close()
        rows.close()


class Documents:
    """Documents by row and by id.

    `id_hashes` uint64 ascending, and `id_rows` the document row of each: by these two versions are matched.
    """

    def __init__(self, blob: Blob, digests: Array | None, id_hashes: Array, id_rows: Array) -> None:
        self._blob = blob
        self._digests = digests
        self.id_hashes = id_hashes
        self.id_rows = id_rows

    @classmethod
    def open(cls, folder: Path, count: int) -> Documents:
        digests = folder / DIGESTS_FILE
        return cls(
            Blob.open(folder, "documents", 2 * count),
            load_array(digests, "|u1", (count, DIGEST_BYTES)) if digests.exists() else None,  # format 1 has none
            load_array(folder / ID_HASHES_FILE, "<u8", (count,)),
            load_array(folder / ID_ROWS_FILE, "<i4", (count,)),
        )

    def __len__(self) -> int:
        return len(self.id_rows)

    def get(self, row: int) -> StoredDocument:
        return StoredDocument(self._blob[2 * row], self._blob[2 * row + 1])

    def text_json(self, row: int) -> bytes:
        """The JSON string of the document's text, quotes included."""
        return self._blob[2 * row + 1]

    def digests(self, rows: Array) -> Array:
        """(rows, 16) uint8: equal digest, equal document."""
        if self._digests is not None:
            return self._digests[rows]
        found = [_digest(self._blob[2 * row], self._blob[2 * row + 1]) for row in rows.tolist()]
        return np.array(found, dtype=np.uint8).reshape(-1, DIGEST_BYTES)

    def row_of(self, document_id: str) -> int | None:
        """The row of the document with this id; equal hashes are told apart by the id itself."""
        try:
            wanted = _hash(document_id)
        except UnicodeEncodeError:  # a lone surrogate is in no stored id
            return None
        first = int(np.searchsorted(self.id_hashes, np.uint64(wanted)))
        for position in range(first, len(self)):
            if int(self.id_hashes[position]) != wanted:
                break
            row = int(self.id_rows[position])
            if self.get(row).id == document_id:
                return row
        return None


def _digest(json: bytes, text_json: bytes) -> Array:
    return np.frombuffer(blake2b(json + text_json, digest_size=DIGEST_BYTES).digest(), dtype=np.uint8)


def _hash(document_id: str) -> int:
    return int.from_bytes(blake2b(document_id.encode(), digest_size=8).digest(), "little")
