"""Stores a snapshot's documents, as the JSON of a response, and their passages; see docs/index-format.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from indexer.errors import TooLarge
from indexer.store.arrays import Array, ArrayWriter, Blob, BlobWriter, load_array, part_bits, rows_of_part
from indexer.store.filters import Metadata

DOCUMENTS_FILES = ("documents.bin", "documents.offsets.npy")
DIGESTS_FILE = "documents.digests.npy"
ID_HASHES_FILE, ID_ROWS_FILE = "ids.hashes.npy", "ids.rows.npy"
# What two versions are compared by.
COMPARED_FILES = (DIGESTS_FILE, ID_HASHES_FILE, ID_ROWS_FILE)
DIGEST_BYTES = 16
OWNERS_FILE, SPANS_FILE, HASHES_FILE = "passages.documents.npy", "passages.spans.npy", "hashes.npy"
HASH_BYTES = 16
# FAISS's graphs and the rows of known vectors in a build are 32-bit numbers.
MOST_PASSAGES = 2**31 - 1
BLOCK_ROWS = 1 << 16
# How much of its text stands for the title of a document that has none.
HEADLINE_CHARACTERS = 60
LONGEST_ID_BYTES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Anything but spaces, control characters and Unicode's format characters (Cc and Cf). The expression reads two
# megabytes in milliseconds; a loop takes a quarter of a second.
_VISIBLE = re.compile(
    r"[^\s\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)
Span = tuple[int, int]


def is_blank(text: str) -> bool:
    """Returns whether a text has nothing but spaces, control characters and invisible marks."""
    return _VISIBLE.search(text) is None


def id_fault(text: str) -> str:
    """Returns why a text is no id, or nothing: an id is part of an address, by which a document is read and deleted."""
    if is_blank(text):
        return "has no visible character"
    if _CONTROL.search(text):
        return "has a control character"
    if text in (".", ".."):
        return "is a step in an address"
    size = len(text.encode(errors="surrogatepass"))
    return f"has {size:,} bytes, and at most {LONGEST_ID_BYTES:,} are allowed" if size > LONGEST_ID_BYTES else ""


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One document; `json` and `text_json` are ready to be written, the rest is parsed on request."""

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
        """The title; if there is none, the beginning of the text, cut between words."""
        if title := self.title.strip():
            return title
        begin = " ".join(self.text[: 4 * HEADLINE_CHARACTERS].split())
        cut = re.sub(r"\s\S{,15}$", "", begin[:HEADLINE_CHARACTERS])
        return begin if len(begin) <= HEADLINE_CHARACTERS else f"{cut}…"

    @property
    def digest(self) -> bytes:
        return blake2b(self.json + self.text_json, digest_size=DIGEST_BYTES).digest()

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = orjson.loads(b"{" + self.json + b"}")
        return fields


class DocumentsWriter:
    """Streams documents to disk; `files` closes the files of a failed build."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._blob = BlobWriter(folder, "documents", files)
        self._digests = files.enter_context(ArrayWriter(folder / DIGESTS_FILE, "|u1", (DIGEST_BYTES,)))
        self._unsorted = files.enter_context(ArrayWriter(folder / "ids.unsorted.npy", "<u8"))

    def add(self, document_id: str, title: str, text: str, metadata: Metadata) -> None:
        stored = StoredDocument.of(document_id, title, text, metadata)
        self._blob.append(stored.json, stored.text_json)
        self._digests.append(np.frombuffer(stored.digest, np.uint8))
        self._unsorted.append([_hash(document_id)])

    def close(self) -> int:
        """Completes the files, ids sorted by hash; returns the number of documents."""
        self._blob.close()
        self._digests.close()
        documents, folder = self._unsorted.close(), self._folder
        hashes, bits = load_array(folder / "ids.unsorted.npy", "<u8", (documents,)), part_bits(documents)
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
        (folder / "ids.unsorted.npy").unlink()
        return documents


class Documents:
    """Documents by row and by id; `id_hashes` uint64 ascending, `id_rows` the document row of each."""

    def __init__(self, blob: Blob, digests: Array | None, id_hashes: Array, id_rows: Array) -> None:
        self._data, self._offsets = blob.data, blob.offsets
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
        if not 0 <= row < len(self.id_rows):
            raise IndexError(row)
        start, middle, end = self._offsets[2 * row : 2 * row + 3]  # JSON and text lie side by side
        return StoredDocument(self._data[start:middle], self._data[middle:end])

    def digests(self, rows: Array) -> Array:
        """(rows, 16) uint8: equal digest, equal document."""
        if self._digests is not None:
            return self._digests[rows]
        found = b"".join(self.get(row).digest for row in rows.tolist())
        return np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)

    def row_of(self, document_id: str) -> int | None:
        """Returns the row of a document; ids of equal hash are compared themselves."""
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


class PassagesWriter:
    """Streams the passages of documents that come in row order; `files` as in DocumentsWriter."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._documents = files.enter_context(ArrayWriter(folder / OWNERS_FILE, "<i4"))
        self._spans = files.enter_context(ArrayWriter(folder / SPANS_FILE, "<i4", (2,)))
        self._hashes = files.enter_context(ArrayWriter(folder / HASHES_FILE, "|u1", (HASH_BYTES,)))

    def add(self, document_row: int, spans: Sequence[Span], hashes: Array) -> None:
        """`hashes` (spans, 16) uint8 let the next build reuse the vectors."""
        if len(self._documents) + len(spans) > MOST_PASSAGES:
            raise TooLarge(f"more than {MOST_PASSAGES} passages: divide the corpus into several collections")
        if len(spans) != len(hashes):
            raise ValueError(f"{len(spans)} passages with {len(hashes)} hashes")
        self._documents.append([document_row] * len(spans))
        self._spans.append(spans)
        self._hashes.append(hashes)

    def close(self) -> int:
        """Completes the files; returns the number of passages."""
        self._spans.close()
        self._hashes.close()
        return self._documents.close()


class Passages:
    """`documents` int32: passage row → document row, ascending, so a document's passages are neighbours."""

    def __init__(self, documents: Array, spans: Array) -> None:
        self.documents = documents
        self._spans = spans

    @classmethod
    def open(cls, folder: Path, count: int) -> Passages:
        owners = load_array(folder / OWNERS_FILE, "<i4", (count,))
        return cls(owners, load_array(folder / SPANS_FILE, "<i4", (count, 2)))

    def __len__(self) -> int:
        return len(self.documents)

    def of(self, document_row: int) -> range:
        """Returns the rows of a document's passages."""
        first, end = np.searchsorted(self.documents, [document_row, document_row + 1]).tolist()
        return range(first, end)

    def first_rows(self) -> Iterator[int]:
        """Yields the row of each document's first passage."""
        last = -1
        for start in range(0, len(self), BLOCK_ROWS):
            owners = self.documents[start : start + BLOCK_ROWS]
            yield from (np.flatnonzero(np.diff(owners, prepend=last)) + start).tolist()
            last = int(owners[-1])

    def span(self, row: int) -> Span:
        """First and last-plus-one character of the passage in its document's text."""
        start, end = self._spans[row].tolist()
        return start, end


def load_hashes(folder: Path, count: int) -> Array:
    """Loads the content hash of each passage, (passages, 16) uint8."""
    return load_array(folder / HASHES_FILE, "|u1", (count, HASH_BYTES))


def _hash(document_id: str) -> int:
    return int.from_bytes(blake2b(document_id.encode(), digest_size=8).digest(), "little")
