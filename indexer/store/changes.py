"""What was posted and deleted since a snapshot, as frames of bytes: one request, one frame, whole or not at all.

A frame is `CFD1`, its position (u64), the length of its body (u32) and the CRC-32 of position, length and body (u32),
little-endian; then the body: the length of its JSON (u32), the JSON, and the vectors of all its passages as float16.
Knows nothing of files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from indexer.store.documents import Metadata
from indexer.store.passages import Span

MAGIC = b"CFD1"
_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_JSON_LENGTH = struct.Struct("<I")
HEAD_BYTES = len(MAGIC) + _HEAD.size + _CHECKSUM.size

Vectors = NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Posted:
    """A document, the spans of its passages, and their vectors (passages, dim) by the encoder of this fingerprint."""

    id: str
    title: str
    text: str
    metadata: Metadata
    spans: Sequence[Span]
    encoder: str
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class Deleted:
    """The id of a document that is no more."""

    id: str


Change = Posted | Deleted


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What one request changed. Positions count frames, from 1, without a gap; `checksum` is that of the bytes."""

    position: int
    checksum: int
    changes: Sequence[Change] = field(repr=False)


def write_frame(position: int, changes: Sequence[Change]) -> bytes:
    facts = orjson.dumps([_facts(change) for change in changes])
    vectors = [change.vectors.astype("<f2").tobytes() for change in changes if isinstance(change, Posted)]
    body = b"".join([_JSON_LENGTH.pack(len(facts)), facts, *vectors])
    head = _HEAD.pack(position, len(body))
    return b"".join([MAGIC, head, _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(head))), body])


def read_frames(data: bytes, start: int = 0) -> Iterator[tuple[Frame, int]]:
    """Every whole frame from `start` on and where it ends; stops before the first that is none."""
    while (frame := _read_frame(data, start)) is not None:
        yield frame
        start = frame[1]


def holds_frame(data: bytes, start: int) -> bool:
    """Whether a whole frame begins anywhere from `start` on."""
    while (start := data.find(MAGIC, start)) >= 0:
        if _is_whole(data, start):
            return True
        start += 1
    return False


def _is_whole(data: bytes, start: int) -> bool:
    return _body(data, start) is not None


def _body(data: bytes, start: int) -> tuple[int, int, memoryview] | None:
    """Position, checksum and body of the frame at `start`; None where there is none, or not all of it."""
    if data[start : start + len(MAGIC)] != MAGIC or start + HEAD_BYTES > len(data):
        return None
    head = data[start + len(MAGIC) : start + len(MAGIC) + _HEAD.size]
    position, length = _HEAD.unpack(head)
    (checksum,) = _CHECKSUM.unpack_from(data, start + len(MAGIC) + _HEAD.size)
    body = memoryview(data)[start + HEAD_BYTES : start + HEAD_BYTES + length]
    if len(body) < length or zlib.crc32(body, zlib.crc32(head)) != checksum:
        return None
    return position, checksum, body


def _read_frame(data: bytes, start: int) -> tuple[Frame, int] | None:
    if (found := _body(data, start)) is None:
        return None
    position, checksum, body = found
    (length,) = _JSON_LENGTH.unpack_from(body)
    facts = orjson.loads(body[_JSON_LENGTH.size : _JSON_LENGTH.size + length])
    changes = _read_changes(facts, np.frombuffer(body, "<f2", offset=_JSON_LENGTH.size + length))
    return Frame(position, checksum, changes), start + HEAD_BYTES + len(body)


def _facts(change: Change) -> dict[str, Any]:
    if isinstance(change, Deleted):
        return {"id": change.id}
    names = ("id", "title", "text", "metadata", "spans", "encoder")
    return {name: getattr(change, name) for name in names} | {"dim": change.vectors.shape[1]}


def _read_changes(facts: Sequence[dict[str, Any]], numbers: Vectors) -> list[Change]:
    changes: list[Change] = []
    start = 0
    for each in facts:
        if "spans" not in each:
            changes.append(Deleted(each["id"]))
            continue
        dim, spans = each.pop("dim"), [(first, end) for first, end in each.pop("spans")]
        own = slice(start, start + len(spans) * dim)
        changes.append(Posted(**each, spans=spans, vectors=numbers[own].reshape(len(spans), dim)))
        start = own.stop
    return changes
