"""The log of documents posted and deleted since the snapshots were built: appended, followed, pruned.

A frame holds one request: `CFD1`, its position (u64), the length of its body (u32), the CRC-32 of position, length and
body (u32), little-endian; the body is the length of its JSON (u32), the JSON, and the passages' vectors as float16.

`fresh/<position>.log` are segments, named by their first frame; only the last one grows. An append is on the disk
before it returns; the next one cuts off a half-written frame, which was never acknowledged. After a failed fsync the
segment is marked, and rewritten before the next append. Readers take no lock, and stop before an incomplete frame.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from indexer.errors import BadLog, NotWritten
from indexer.store.documents import Span, StoredDocument
from indexer.store.files import in_turn, replace_file, sync
from indexer.store.filters import Metadata

logger = logging.getLogger(__name__)

MAGIC = b"CFD1"
_HEAD = struct.Struct("<QI")
_LENGTH = struct.Struct("<I")
HEAD_BYTES = len(MAGIC) + _HEAD.size + _LENGTH.size
SUFFIX = ".log"
LOCK_FILE = "LOCK"
# Beside a segment whose fsync failed.
UNSYNCED = ".unsynced"
DIGITS = 20

Vectors = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A posted document before it is encoded."""

    id: str
    title: str
    text: str
    metadata: Metadata

    def stored(self) -> StoredDocument:
        return StoredDocument.of(self.id, self.title, self.text, self.metadata)

    def encoded(self, spans: Sequence[Span], encoder: str, vectors: Vectors) -> Posted:
        return Posted(self.id, self.title, self.text, self.metadata, spans, encoder, vectors)


@dataclass(frozen=True, slots=True, eq=False)
class Posted(NewDocument):
    """A document, the spans of its passages, and their vectors (passages, dim) by the encoder of this fingerprint."""

    spans: Sequence[Span]
    encoder: str
    vectors: Vectors


@dataclass(frozen=True, slots=True)
class Deleted:
    """The id of a deleted document."""

    id: str


Change = Posted | Deleted


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What one request changed. Positions count frames, from 1, without a gap; `checksum` is that of the bytes."""

    position: int
    checksum: int
    changes: Sequence[Change] = field(repr=False)


Decide = Callable[[Sequence[Frame], int], Sequence[Change]]
"""Frames that were appended meanwhile and the first position of the last segment → changes to append. May raise."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """A reader's place: past the frame at `position`, at byte `offset` of `segment` (0: before any segment)."""

    position: int
    segment: int = 0
    offset: int = 0


class FreshLog:
    """The log in one folder. It remembers how far the log is sound."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known = Cursor(0)

    def append(self, changes: Sequence[Change], after: int = 0) -> int:
        """Returns the position of the changes, beyond `after`, once they are on the disk; raises NotWritten or BadLog.

        `after` is the served snapshot's position: readers skip what a snapshot may hold.
        """
        with self._writing() as end:
            return self._append(changes, end, after)

    def change(self, since: Cursor, decide: Decide, after: int = 0) -> int:
        """Appends what `decide` returns, without an append in between; if that is nothing, syncs what is there."""
        with self._writing() as end:
            if since.position > max(end.position, after):  # no reader would see what is appended here
                gone = f"{self.folder} ends at {end.position}, and this service has read up to {since.position}"
                raise BadLog(f"{gone}: it was removed or replaced; restart every service of the collection")
            frames, _ = self._read(since)
            if changes := decide(frames, end.segment):
                return self._append(changes, end, after)
            if end.segment:
                with self._path(end.segment).open("rb") as file:
                    self._sync(file, end.segment)
            return end.position

    def read(self, cursor: Cursor) -> tuple[list[Frame], Cursor]:
        """Reads the frames after the cursor, in order, and where they end. Raises BadLog if the next is missing."""
        try:
            return self._read(cursor)
        except OSError as error:
            raise BadLog(f"{self.folder} cannot be read ({error}); check the disk and the permissions") from error

    def last_segment(self) -> int:
        """Returns the first position of the last segment, 0 if there is none: builds hold nothing from there on."""
        return max(self._segments(), default=0)

    def seal(self) -> int:
        """Makes the next append begin a segment; returns the last position, 0 if nothing was ever appended."""
        if not self.folder.is_dir():
            return 0
        with self._writing() as end:
            if end.offset:
                self._begin_segment(end.position + 1)
            return end.position

    def prune(self, position: int) -> None:
        """Removes segments that end at or before this position; the last one stays, because its name counts on."""
        if not self.folder.is_dir():
            return
        with self._in_turn():
            for first, following in pairwise(self._segments()):
                if following <= position + 1:
                    self._path(first).unlink()
            sync(self.folder)

    def _read(self, cursor: Cursor) -> tuple[list[Frame], Cursor]:
        segments = self._segments()
        if segments and segments[0] > cursor.position + 1:
            raise BadLog(self._gap(cursor.position, segments[0]))
        segments = segments[sum(following <= cursor.position + 1 for following in segments[1:]) :]
        frames: list[Frame] = []
        for first, following in zip_longest(segments, segments[1:]):
            start = cursor.offset if first == cursor.segment else 0
            data = _read_from(self._path(first), start)
            offset = 0
            for frame, offset in read_frames(data):
                if frame.position > cursor.position + 1:
                    raise BadLog(self._gap(cursor.position, frame.position))
                if frame.position == cursor.position + 1:
                    frames.append(frame)
                    cursor = Cursor(frame.position, first, start + offset)
            self._require_torn(first, data, offset)
            cursor = Cursor(cursor.position, first, start + offset)
            # Nothing was appended to it after the next began: a missing frame was acknowledged.
            if following is not None and following > cursor.position + 1:
                raise BadLog(self._gap(cursor.position, following))
        return frames, cursor

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        if not self.folder.is_dir():
            self.folder.mkdir(exist_ok=True)
            sync(self.folder.parent)
        with in_turn(self.folder / LOCK_FILE):
            yield

    @contextmanager
    def _writing(self) -> Iterator[Cursor]:
        """Yields the sound end of the log, under the lock; raises NotWritten if the disk refuses a write."""
        try:
            with self._in_turn():
                yield self._sound_end()
        except OSError as error:
            raise NotWritten(self.folder, error) from error

    def _append(self, changes: Sequence[Change], end: Cursor, after: int) -> int:
        position = max(end.position, after) + 1
        if not end.segment or position > end.position + 1:
            end = self._begin_segment(position)
        data = write_frame(position, changes)
        with self._path(end.segment).open("ab", buffering=0) as file:
            start = file.tell()
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                os.ftruncate(file.fileno(), start)  # no reader saw it whole
                raise
            # If this fails, readers may have seen a whole frame: it stays, unacknowledged.
            self._sync(file, end.segment)
        self._known = Cursor(position, end.segment, end.offset + len(data))
        return position

    def _sync(self, file: IO[bytes], segment: int) -> None:
        try:
            os.fsync(file.fileno())
        except OSError:
            self._mark(segment).touch()
            sync(self.folder)
            raise

    def _sound_end(self) -> Cursor:
        """Returns the end of the last segment; cuts off an incomplete frame. Under the lock only."""
        segments = self._segments()
        if not segments:
            return Cursor(0)
        last, path = segments[-1], self._path(segments[-1])
        if self._mark(last).exists():  # its fsync failed
            replace_file(path, path.read_bytes())
            self._mark(last).unlink()
        known = self._known
        if known.segment != last or known.offset > path.stat().st_size:
            known = Cursor(last - 1, last)
        data = _read_from(path, known.offset)
        position, end = known.position, 0
        for frame, frame_end in read_frames(data):
            position, end = frame.position, frame_end
        if end < len(data):
            self._require_torn(last, data, end)
            logger.warning("%s: %d bytes that were never acknowledged are cut off", path, len(data) - end)
            with path.open("r+b") as file:
                file.truncate(known.offset + end)
                os.fsync(file.fileno())
        return Cursor(position, last, known.offset + end)

    def _require_torn(self, segment: int, data: bytes, end: int) -> None:
        """Raises BadLog if a complete frame, which was acknowledged, follows the incomplete bytes."""
        start = end + 1
        while end < len(data) and (start := data.find(MAGIC, start)) >= 0:
            if _read_body(data, start) is not None:
                damaged = f"{self._path(segment)} is damaged before frames that are whole"
                raise BadLog(f"{damaged}; restore it from a backup")
            start += 1

    def _begin_segment(self, first: int) -> Cursor:
        self._path(first).touch()
        sync(self.folder)
        return Cursor(first - 1, first)

    def _segments(self) -> list[int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return sorted(int(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX))

    def _path(self, first: int) -> Path:
        return self.folder / f"{first:0{DIGITS}}{SUFFIX}"

    def _mark(self, first: int) -> Path:
        return self._path(first).with_suffix(f"{SUFFIX}{UNSYNCED}")

    def _gap(self, position: int, found: int) -> str:
        gap = f"{self.folder} goes on with position {found} after {position}"
        return f"{gap}; restore what is missing from a backup, or remove the folder to go on without all of it"


def write_frame(position: int, changes: Sequence[Change]) -> bytes:
    facts = orjson.dumps([_facts(change) for change in changes])
    vectors = [change.vectors.astype("<f2").tobytes() for change in changes if isinstance(change, Posted)]
    body = b"".join([_LENGTH.pack(len(facts)), facts, *vectors])
    head = _HEAD.pack(position, len(body))
    return b"".join([MAGIC, head, _LENGTH.pack(zlib.crc32(body, zlib.crc32(head))), body])


def read_frames(data: bytes) -> Iterator[tuple[Frame, int]]:
    """Yields every whole frame and where it ends; stops before the first incomplete one."""
    start = 0
    while (found := _read_body(data, start)) is not None:
        position, checksum, body = found
        (length,) = _LENGTH.unpack_from(body)
        numbers = np.frombuffer(body, "<f2", offset=_LENGTH.size + length)
        changes: list[Change] = []
        for facts in orjson.loads(body[_LENGTH.size : _LENGTH.size + length]):
            if "spans" not in facts:
                changes.append(Deleted(facts["id"]))
                continue
            dim, spans = facts.pop("dim"), [(first, end) for first, end in facts.pop("spans")]
            vectors, numbers = np.split(numbers, [len(spans) * dim])
            changes.append(Posted(**facts, spans=spans, vectors=vectors.reshape(len(spans), dim)))
        start += HEAD_BYTES + len(body)
        yield Frame(position, checksum, changes), start


def _read_body(data: bytes, start: int) -> tuple[int, int, memoryview] | None:
    """Position, checksum and body of the frame at `start`; None if there is no whole frame."""
    if data[start : start + len(MAGIC)] != MAGIC or start + HEAD_BYTES > len(data):
        return None
    head = data[start + len(MAGIC) : start + len(MAGIC) + _HEAD.size]
    position, length = _HEAD.unpack(head)
    (checksum,) = _LENGTH.unpack_from(data, start + len(MAGIC) + _HEAD.size)
    body = memoryview(data)[start + HEAD_BYTES : start + HEAD_BYTES + length]
    if len(body) < length or zlib.crc32(body, zlib.crc32(head)) != checksum:
        return None
    return position, checksum, body


def _facts(change: Change) -> dict[str, Any]:
    if isinstance(change, Deleted):
        return {"id": change.id}
    names = ("id", "title", "text", "metadata", "spans", "encoder")
    return {name: getattr(change, name) for name in names} | {"dim": change.vectors.shape[1]}


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:  # pruned since it was listed: nothing in it was still wanted
        return b""
