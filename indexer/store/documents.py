"""The documents of a snapshot, kept as the JSON that an answer needs, so that a hit is two slices of a map.

Files: `documents.bin` + `documents.offsets.npy` (two runs a document: the inside of its JSON object without text, and
the JSON string of its text), `ids.hashes.npy` + `ids.rows.npy` (id → document row). Knows nothing of passages,
vectors or filters.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from indexer.store.arrays import Array, Blob, BlobWriter, load_array, save_array

Value = str | bool | int | float | Sequence[str] | None
Metadata = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One document; `json` and `text_json` are ready to be written, the rest is parsed when asked for."""

    json: bytes
    text_json: bytes

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

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = orjson.loads(b"{" + self.json + b"}")
        return fields


class DocumentsWriter:
    """Streams documents to disk; keeps only offsets and id hashes in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blob = BlobWriter(folder, "documents")
        self._hashes = array("Q")

    def add(self, document_id: str, title: str, text: str, metadata: Metadata) -> None:
        inside = orjson.dumps({"id": document_id, "title": title, "metadata": metadata})[1:-1]
        self._blob.append(inside)
        self._blob.append(orjson.dumps(text))
        self._hashes.append(_hash(document_id))

    def release(self) -> None:
        """Gives up the open file of a build that failed."""
        self._blob.release()

    def close(self) -> int:
        """Completes the files; returns the number of documents."""
        self._blob.close()
        hashes = np.asarray(self._hashes, dtype="<u8")
        order = np.argsort(hashes, kind="stable")
        save_array(self._folder / "ids.hashes.npy", hashes[order], "<u8")
        save_array(self._folder / "ids.rows.npy", order, "<i4")
        return len(hashes)


class Documents:
    """Documents by row and by id."""

    def __init__(self, blob: Blob, id_hashes: Array, id_rows: Array) -> None:
        self._blob = blob
        self._id_hashes = id_hashes
        self._id_rows = id_rows

    @classmethod
    def open(cls, folder: Path, count: int) -> Documents:
        return cls(
            Blob.open(folder, "documents", 2 * count),
            load_array(folder / "ids.hashes.npy", "<u8", (count,)),
            load_array(folder / "ids.rows.npy", "<i4", (count,)),
        )

    def __len__(self) -> int:
        return len(self._id_rows)

    def get(self, row: int) -> StoredDocument:
        return StoredDocument(self._blob[2 * row], self._blob[2 * row + 1])

    def text_json(self, row: int) -> bytes:
        """The JSON string of the document's text, quotes included."""
        return self._blob[2 * row + 1]

    def row_of(self, document_id: str) -> int | None:
        """The row of the document with this id; equal hashes are told apart by the id itself."""
        try:
            wanted = _hash(document_id)
        except UnicodeEncodeError:  # a lone surrogate is in no stored id
            return None
        first = int(np.searchsorted(self._id_hashes, np.uint64(wanted)))
        for position in range(first, len(self)):
            if int(self._id_hashes[position]) != wanted:
                break
            row = int(self._id_rows[position])
            if self.get(row).id == document_id:
                return row
        return None


def _hash(document_id: str) -> int:
    return int.from_bytes(blake2b(document_id.encode(), digest_size=8).digest(), "little")
