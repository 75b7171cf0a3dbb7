"""What crosses the socket between a worker and the engine process: frames of a few numbers and the bytes of arrays.

A frame is its length and its body; the first byte of a body says what it is. Both ends run on one machine, so numbers
are in its own byte order and times are its monotonic clock's. Nothing is ever unpickled. Knows nothing of sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from indexer.store.filters import AnyOf, Either, Equal, Filter, Not, Range
from models.tokenizer import FlatIds
from service.engine.protocol import BatchTimes

# Larger than any batch of vectors: who announces more is no worker of ours.
MOST_BYTES = 256 * 1024 * 1024
# What is read from a socket at a time.
READ_BYTES = 256 * 1024

Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]

_LENGTH = struct.Struct("=I")
_ASK = struct.Struct("=BBIIIIId")
_ANSWER = struct.Struct("=BBIIIIIIff")
_CONTROL = struct.Struct("=BI")
_BULK, _KEEP_VECTORS, _READY_VECTORS = 1, 2, 4

NO_TOKENS = np.empty(0, np.int32)
NO_VECTORS = np.empty((0, 0), np.float32)
NO_ROWS = np.empty((0, 0), np.int64)


class BadFrame(Exception):
    """Bytes that no end of this protocol sends."""


class Kind(IntEnum):
    """What a frame is, and who sends it."""

    ASK = 1
    OPEN = 2
    RELEASE = 3
    CHECK = 4
    ANSWER = 5
    OPENED = 6
    REFUSED = 7


class Status(IntEnum):
    """How an ask ended."""

    DONE = 0
    FAILED = 1
    EXPIRED = 2
    UNKNOWN_SERVING = 3
    DATABASE_AWAY = 4


# Not frozen, though nobody changes them: a frozen object takes five times as long to make, and these are made for every
# ask of every worker.
@dataclass(slots=True, eq=False)
class Ask:
    """Queries of one serving with equal options: tokens (`ids` one query after the other, `lengths`) or `vectors`.

    `k` rows are wanted for each; 0 wants the embeddings alone. `deadline` is of the monotonic clock.
    """

    number: int
    handle: int
    k: int
    bulk: bool = False
    keep_vectors: bool = False
    deadline: float = float("inf")
    filters: bytes = b""
    ids: FlatIds = field(default_factory=lambda: NO_TOKENS)
    lengths: FlatIds = field(default_factory=lambda: NO_TOKENS)
    vectors: Vectors = field(default_factory=lambda: NO_VECTORS)

    @property
    def size(self) -> int:
        return len(self.lengths) or len(self.vectors)


@dataclass(slots=True, eq=False)
class Answer:
    """What one ask found: `rows` and `scores` (queries, k), `vectors` (queries, dim) where they were wanted.

    `batch` queries were computed together; `waiting` more stood before the engine when they were done.
    """

    number: int
    status: Status
    times: BatchTimes = field(default_factory=lambda: BatchTimes(0.0, 0.0))
    batch: int = 0
    waiting: int = 0
    rows: Rows = field(default_factory=lambda: NO_ROWS)
    scores: Vectors = field(default_factory=lambda: NO_VECTORS)
    vectors: Vectors = field(default_factory=lambda: NO_VECTORS)


class FrameReader:
    """Cuts what arrives on one connection into the bodies of frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[memoryview]:
        data = self._rest + data if self._rest else data
        view, position, bodies = memoryview(data), 0, []
        while len(data) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, position)
            if not 0 < length <= MOST_BYTES:
                raise BadFrame(f"a frame of {length} bytes")
            end = position + _LENGTH.size + length
            if end > len(data):
                break
            bodies.append(view[position + _LENGTH.size : end])
            position = end
        self._rest = data[position:]
        return bodies


def kind_of(body: memoryview) -> Kind:
    try:
        return Kind(body[0])
    except ValueError as error:
        raise BadFrame(f"a frame of kind {body[0]}") from error


def write_ask(ask: Ask) -> bytes:
    ready = len(ask.vectors) > 0
    flags = _BULK * ask.bulk | _KEEP_VECTORS * ask.keep_vectors | _READY_VECTORS * ready
    head = _ASK.pack(Kind.ASK, flags, ask.number, ask.handle, ask.size, ask.k, len(ask.filters), ask.deadline)
    arrays = [ask.vectors] if ready else [ask.lengths, ask.ids]
    return _frame([head, ask.filters, *(array.tobytes() for array in arrays)])


def read_ask(body: memoryview) -> Ask:
    try:
        _, flags, number, handle, size, k, filters, deadline = _ASK.unpack_from(body)
        rest = body[_ASK.size + filters :]
        keep, bulk = bool(flags & _KEEP_VECTORS), bool(flags & _BULK)
        own = bytes(body[_ASK.size : _ASK.size + filters])
        if flags & _READY_VECTORS:
            vectors = np.frombuffer(rest, np.float32).reshape(size, -1)
            ask = Ask(number, handle, k, bulk, keep, deadline, own, vectors=vectors)
        else:
            tokens = np.frombuffer(rest, np.int32)
            ask = Ask(number, handle, k, bulk, keep, deadline, own, tokens[size:], tokens[:size])
    except (struct.error, ValueError) as error:
        raise BadFrame("an ask that cannot be read") from error
    # By lists: of a few numbers they are several times quicker than arrays.
    lengths = ask.lengths.tolist()
    if not (lengths or ask.vectors.size) or min(lengths, default=1) < 1 or sum(lengths) != len(ask.ids):
        raise BadFrame("an ask for nothing, or of tokens that do not add up")
    return ask


def write_answer(answer: Answer) -> bytes:
    size, k = answer.rows.shape
    own = (answer.number, size or len(answer.vectors), k, answer.vectors.shape[1], answer.batch, answer.waiting)
    times = (answer.times.encode_seconds, answer.times.search_seconds)
    head = _ANSWER.pack(Kind.ANSWER, answer.status, *own, *times)
    return _frame([head, answer.rows.tobytes(), answer.scores.tobytes(), answer.vectors.tobytes()])


def read_answer(body: memoryview) -> Answer:
    _, status, number, size, k, dim, batch, waiting, encode_seconds, search_seconds = _ANSWER.unpack_from(body)
    start = _ANSWER.size
    rows = np.frombuffer(body, np.int64, size * k, start).reshape(size, k)
    scores = np.frombuffer(body, np.float32, size * k, start + rows.nbytes).reshape(size, k)
    vectors = np.frombuffer(body, np.float32, size * dim, start + rows.nbytes + scores.nbytes).reshape(size, dim)
    times = BatchTimes(encode_seconds, search_seconds)
    return Answer(number, Status(status), times, batch, waiting, rows, scores, vectors)


def write_control(kind: Kind, number: int, facts: object = None) -> bytes:
    """A frame of a number and a JSON value."""
    return _frame([_CONTROL.pack(kind, number), orjson.dumps(facts)])


def read_control(body: memoryview) -> tuple[int, Any]:
    try:
        (_, number) = _CONTROL.unpack_from(body)
        return number, orjson.loads(body[_CONTROL.size :])
    except (struct.error, orjson.JSONDecodeError) as error:
        raise BadFrame("a control frame that cannot be read") from error


def write_filters(filters: Iterable[Filter]) -> bytes:
    """Equal filters give equal bytes; no filters give none."""
    plain = tuple(filters)
    return orjson.dumps(plain) if plain else b""


def read_filters(written: bytes) -> tuple[Filter, ...]:
    return tuple(_read_filter(facts) for facts in orjson.loads(written)) if written else ()


def _read_filter(facts: dict[str, Any]) -> Filter:
    if "excluded" in facts:
        return Not(_read_filter(facts["excluded"]))
    if "alternatives" in facts:
        return Either(tuple(_read_filter(each) for each in facts["alternatives"]))
    if "value" in facts:
        return Equal(**facts)
    return AnyOf(facts["field"], tuple(facts["values"])) if "values" in facts else Range(**facts)


def _frame(parts: list[bytes]) -> bytes:
    return b"".join([_LENGTH.pack(sum(map(len, parts))), *parts])
