"""Frames on the engine's socket: written and read back, in any pieces; invalid ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.store.filters import AnyOf, Either, Equal, Filter, Not, Range
from service.engine.jobs import NO_ROWS, NO_VECTORS, BatchTimes, Request, Response, Status
from service.engine.remote import frames
from service.engine.remote.frames import BadFrame, FrameReader, Kind

FILTERS: tuple[Filter, ...] = (
    Equal("kind", "drug"),
    Equal("year", 2024),
    AnyOf("department", ("心内科", "全科")),
    Range("updated", gte="2025-01-01", lt="2026-01-01"),
    Range("dose", gt=0.5),
    Not(Either((Equal("kind", "test"), Not(AnyOf("year", (2023, 2024)))))),
)


def only(written: bytes) -> memoryview:
    (body,) = FrameReader().feed(written)
    return body


def test_a_request_of_tokens_is_read_as_written() -> None:
    ids, lengths = np.arange(9, dtype=np.int32), np.array([4, 5], np.int32)
    request = Request(7, 3, 10, True, True, 12.5, FILTERS, ids, lengths)
    body = only(frames.write_request(request))
    assert frames.kind_of(body) is Kind.REQUEST
    read = frames.read_request(body)
    assert (read.number, read.handle, read.k, read.bulk, read.keep_vectors, read.deadline) == (
        7,
        3,
        10,
        True,
        True,
        12.5,
    )
    assert read.filters == FILTERS
    np.testing.assert_array_equal(read.ids, ids)
    np.testing.assert_array_equal(read.lengths, lengths)
    assert (read.size, len(read.vectors)) == (2, 0)


def test_a_request_of_vectors_is_read_as_written() -> None:
    vectors = np.random.default_rng(0).random((3, 5), np.float32)
    read = frames.read_request(only(frames.write_request(Request(1, 2, 4, vectors=vectors))))
    np.testing.assert_array_equal(read.vectors, vectors)
    assert (read.size, read.bulk, read.keep_vectors, read.filters) == (3, False, False, ())
    assert read.deadline == float("inf")


@pytest.mark.parametrize(("k", "dim"), [(4, 0), (4, 6), (0, 6)])
def test_an_answer_is_read_as_written(k: int, dim: int) -> None:
    randomly = np.random.default_rng(0)
    rows = randomly.integers(-1, 2**40, (3, k)) if k else NO_ROWS
    scores = randomly.random((3, k), np.float32) if k else NO_VECTORS
    vectors = randomly.random((3, dim), np.float32) if dim else NO_VECTORS
    answer = Response(9, Status.DONE, BatchTimes(0.25, 0.5), 17, 4, rows, scores, vectors)
    body = only(frames.write_response(answer))
    assert frames.kind_of(body) is Kind.RESPONSE
    read = frames.read_response(body)
    assert (read.number, read.status, read.times, read.batch, read.waiting) == (9, Status.DONE, answer.times, 17, 4)
    assert read.rows.shape == (3, k)
    assert read.vectors.shape == (3, dim)
    np.testing.assert_array_equal(read.rows, np.reshape(rows, (3, k)))
    np.testing.assert_array_equal(read.scores, np.reshape(scores, (3, k)))
    np.testing.assert_array_equal(read.vectors, np.reshape(vectors, (3, dim)))


def test_a_slice_of_a_deeper_answer_is_written_correctly() -> None:
    rows, scores = np.arange(12).reshape(3, 4), np.arange(12, dtype=np.float32).reshape(3, 4)
    response = Response(1, Status.DONE, rows=rows[:, :2], scores=scores[:, :2])
    read = frames.read_response(only(frames.write_response(response)))
    assert read.rows.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert read.scores.tolist() == [[0, 1], [4, 5], [8, 9]]


@pytest.mark.parametrize("status", [Status.FAILED, Status.EXPIRED, Status.UNKNOWN_SERVING])
def test_an_answer_without_results_is_read_as_written(status: Status) -> None:
    read = frames.read_response(only(frames.write_response(Response(5, status))))
    assert (read.number, read.status, read.rows.size, read.vectors.size) == (5, status, 0, 0)


def test_a_control_frame_is_read_as_written() -> None:
    body = only(frames.write_control(Kind.OPEN, 3, ("version", "指纹")))
    assert frames.kind_of(body) is Kind.OPEN
    assert frames.read_control(body) == (3, ["version", "指纹"])


def test_no_filters_are_no_bytes_and_equal_filters_have_equal_bytes() -> None:
    plain, filtered, equal = (
        frames.write_request(Request(1, 1, 1, filters=filters, vectors=np.ones((1, 2), np.float32)))
        for filters in ((), FILTERS, (*FILTERS,))
    )
    assert len(plain) < len(filtered)
    assert frames.read_request(only(plain)).filters == ()
    assert filtered == equal


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_frames_are_found_however_the_bytes_are_cut(sizes: list[int], cuts: list[int]) -> None:
    sent = [frames.write_control(Kind.OPENED, number, "x" * size) for number, size in enumerate(sizes)]
    stream, reader, bodies, position = b"".join(sent), FrameReader(), [], 0
    for cut in [*cuts, len(stream)]:
        bodies += [bytes(body) for body in reader.feed(stream[position : position + cut])]
        position += cut
    assert [frames.read_control(memoryview(body)) for body in bodies] == [
        (number, "x" * size) for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("nonsense", [b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_an_impossible_length_is_refused(nonsense: bytes) -> None:
    with pytest.raises(BadFrame):
        FrameReader().feed(nonsense)


@pytest.mark.parametrize("body", [b"\x01", b"\x01" + b"\0" * 20, b"\x01\x04" + b"\x07\0\0\0" * 5 + b"\0" * 8])
def test_a_truncated_request_is_refused(body: bytes) -> None:
    with pytest.raises(BadFrame):
        frames.read_request(memoryview(body))


@pytest.mark.parametrize(("ids", "lengths"), [(9, [4, 4]), (4, [4, 0]), (0, []), (3, [4, -1])])
def test_tokens_that_do_not_add_up_are_refused(ids: int, lengths: list[int]) -> None:
    request = Request(1, 1, 1, ids=np.zeros(ids, np.int32), lengths=np.array(lengths, np.int32))
    with pytest.raises(BadFrame):
        frames.read_request(only(frames.write_request(request)))


def test_other_invalid_frames_are_refused() -> None:
    with pytest.raises(BadFrame):
        frames.kind_of(memoryview(b"\x63"))
    with pytest.raises(BadFrame):
        frames.read_control(memoryview(b"\x02"))
    with pytest.raises(BadFrame):
        frames.read_control(memoryview(b"\x02\0\0\0\0{"))


def test_a_request_of_pairs_is_marked_and_weighed_by_its_tokens() -> None:
    ids, lengths = np.arange(110, dtype=np.int32), np.array([70, 40], np.int32)
    read = frames.read_request(only(frames.write_request(Request(1, 2, 0, ids=ids, lengths=lengths, pairs=True))))
    assert read.pairs
    assert (read.size, read.load) == (2, 3 + 2)
    plain = frames.read_request(only(frames.write_request(Request(1, 2, 0, ids=ids, lengths=lengths))))
    assert not plain.pairs
    assert plain.load == 2
