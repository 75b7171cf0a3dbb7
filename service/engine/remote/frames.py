"""Frames on the socket between a worker and the engine process: a few numbers and the bytes of arrays.

A frame is its length and its body; the first byte of a body is its kind. Both ends run on one machine, so numbers are
in native byte order and times are of its monotonic clock. Nothing is unpickled.
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

from indexer.store import AnyOf, Either, Equal, Filter, Not, Range
from models.tokenizer import FlatIds
from service.engine.jobs import BatchTimes

# Larger than any batch of vectors: a longer frame is not from a worker.
MOST_BYTES = 256 * 1024 * 1024
# Bytes of one read from a socket.
READ_BYTES = 256 * 1024

Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]

_LENGTH = struct.Struct("=I")
_REQUEST = struct.Struct("=BBIIIIId")
_RESPONSE = struct.Struct("=BBIIIIIIff")
_CONTROL = struct.Struct("=BI")
_BULK, _KEEP_VECTORS, _READY_VECTORS = 1, 2, 4

NO_TOKENS = np.empty(0, np.int32)
NO_VECTORS = np.empty((0, 0), np.float32)
NO_ROWS = np.empty((0, 0), np.int64)


class BadFrame(Exception):
    """Bytes that are not a frame of this protocol."""


class Kind(IntEnum):
    """Kinds of frames: four from workers, three from the engine."""

    REQUEST = 1
    OPEN = 2
    RELEASE = 3
    CHECK = 4
    RESPONSE = 5
    OPENED = 6
    REFUSED = 7


class Status(IntEnum):
    """How a request ended."""

    DONE = 0
    FAILED = 1
    EXPIRED = 2
    UNKNOWN_SERVING = 3
    DATABASE_AWAY = 4


# Not frozen: a frozen object takes five times as long to make, and these are made for every request.
@dataclass(slots=True, eq=False)
class Request:
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
class Response:
    """What one request found: `rows` and `scores` (queries, k), and `vectors` (queries, dim) if they were wanted.

    `batch` queries were computed together; `waiting` more waited for the engine at the end.
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
    """Splits the bytes of one connection into bodies of frames."""

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


def write_request(request: Request) -> bytes:
    ready = len(request.vectors) > 0
    flags = _BULK * request.bulk | _KEEP_VECTORS * request.keep_vectors | _READY_VECTORS * ready
    own = (request.number, request.handle, request.size, request.k, len(request.filters), request.deadline)
    arrays = [request.vectors] if ready else [request.lengths, request.ids]
    head = _REQUEST.pack(Kind.REQUEST, flags, *own)
    return _frame([head, request.filters, *(array.tobytes() for array in arrays)])


def read_request(body: memoryview) -> Request:
    try:
        _, flags, number, handle, size, k, filters, deadline = _REQUEST.unpack_from(body)
        rest = body[_REQUEST.size + filters :]
        own = bytes(body[_REQUEST.size : _REQUEST.size + filters])
        request = Request(number, handle, k, bool(flags & _BULK), bool(flags & _KEEP_VECTORS), deadline, own)
        if flags & _READY_VECTORS:
            request.vectors = np.frombuffer(rest, np.float32).reshape(size, -1)
        else:
            tokens = np.frombuffer(rest, np.int32)
            request.ids, request.lengths = tokens[size:], tokens[:size]
    except (struct.error, ValueError) as error:
        raise BadFrame("a request that cannot be read") from error
    # By lists: for a few numbers they are several times faster than arrays.
    lengths = request.lengths.tolist()
    if not (lengths or request.vectors.size) or min(lengths, default=1) < 1 or sum(lengths) != len(request.ids):
        raise BadFrame("a request for nothing, or of tokens that do not add up")
    return request


def write_response(response: Response) -> bytes:
    size, k = response.rows.shape
    size, dim = size or len(response.vectors), response.vectors.shape[1]
    own = (response.number, size, k, dim, response.batch, response.waiting)
    times = (response.times.encode_seconds, response.times.search_seconds)
    head = _RESPONSE.pack(Kind.RESPONSE, response.status, *own, *times)
    return _frame([head, response.rows.tobytes(), response.scores.tobytes(), response.vectors.tobytes()])


def read_response(body: memoryview) -> Response:
    _, status, number, size, k, dim, batch, waiting, encode_seconds, search_seconds = _RESPONSE.unpack_from(body)
    start = _RESPONSE.size
    rows = np.frombuffer(body, np.int64, size * k, start).reshape(size, k)
    scores = np.frombuffer(body, np.float32, size * k, start + rows.nbytes).reshape(size, k)
    vectors = np.frombuffer(body, np.float32, size * dim, start + rows.nbytes + scores.nbytes).reshape(size, dim)
    times = BatchTimes(encode_seconds, search_seconds)
    return Response(number, Status(status), times, batch, waiting, rows, scores, vectors)


def write_control(kind: Kind, number: int, facts: object = None) -> bytes:
    """Writes a frame of a number and a JSON value."""
    return _frame([_CONTROL.pack(kind, number), orjson.dumps(facts)])


def read_control(body: memoryview) -> tuple[int, Any]:
    try:
        (_, number) = _CONTROL.unpack_from(body)
        return number, orjson.loads(body[_CONTROL.size :])
    except (struct.error, orjson.JSONDecodeError) as error:
        raise BadFrame("a control frame that cannot be read") from error


def write_filters(filters: Iterable[Filter]) -> bytes:
    """Writes filters as JSON: equal filters give equal bytes, no filters give none."""
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
