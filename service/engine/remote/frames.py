"""Encodes frames for the socket between a worker and the engine process: a few numbers and the bytes of arrays.

A frame is its length and its body; the first byte of a body is its kind. Both ends run on one machine, so numbers are
in native byte order and times are of its monotonic clock. Nothing is unpickled.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np
import orjson

from indexer.store.filters import AnyOf, Either, Equal, Filter, Not, Range
from service.engine.jobs import BatchTimes, Request, Response, Status

# Larger than any batch of vectors: a longer frame is not from a worker.
MOST_BYTES = 256 * 1024 * 1024
# Bytes of one read from a socket.
READ_BYTES = 256 * 1024

_LENGTH = struct.Struct("=I")
_REQUEST = struct.Struct("=BBIIIIId")
_RESPONSE = struct.Struct("=BBIIIIIIff")
_CONTROL = struct.Struct("=BI")
_BULK, _KEEP_VECTORS, _READY_VECTORS, _PAIRS = 1, 2, 4, 8


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
    flags = (
        _BULK * request.bulk | _KEEP_VECTORS * request.keep_vectors | _READY_VECTORS * ready | _PAIRS * request.pairs
    )
    filters = orjson.dumps(request.filters) if request.filters else b""
    own = (request.number, request.handle, request.size, request.k, len(filters), request.deadline)
    arrays = [request.vectors] if ready else [request.lengths, request.ids]
    return _frame([_REQUEST.pack(Kind.REQUEST, flags, *own), filters, *(array.tobytes() for array in arrays)])


def read_request(body: memoryview) -> Request:
    try:
        _, flags, number, handle, size, k, filters, deadline = _REQUEST.unpack_from(body)
        rest = body[_REQUEST.size + filters :]
        facts = orjson.loads(body[_REQUEST.size : _REQUEST.size + filters]) if filters else ()
        request = Request(number, handle, k, bool(flags & _BULK), bool(flags & _KEEP_VECTORS), deadline)
        request.filters, request.pairs = tuple(map(_read_filter, facts)), bool(flags & _PAIRS)
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
