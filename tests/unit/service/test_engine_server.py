"""The engine's loop, with a device that a test can block: batches across workers, order, failures, leaving workers."""

from __future__ import annotations

import gc
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service.engine.jobs import Request, Status
from service.engine.remote import frames
from service.engine.remote.frames import Kind
from service.processes.startup import SupervisorPipe
from tests.unit.service.running_engine import CLOSED, OPEN, POISON, WAIT_SECONDS, Running, Worker


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    try:
        yield running
    finally:
        running.device.gate.set()
        running.server.end()
        assert running.is_over()
        running.listener.close()


def block_device(engine: Running, worker: Worker) -> None:
    """Sends a query that stays in the device until the gate opens, so that later requests have to wait."""
    engine.device.gate.clear()
    worker.send_request(0, 50)
    assert engine.device.entered.acquire(timeout=WAIT_SECONDS)


def test_a_single_request_is_answered(engine: Running) -> None:
    with engine.worker() as worker:
        worker.send_request(7, 3, 5, k=2)
        answer = worker.answer()
        worker.send_request(8, 1)  # answered after the first batch was reported, which follows its answers
        worker.answer()
    assert (answer.number, answer.status, answer.batch, answer.waiting) == (7, Status.DONE, 2, 0)
    assert answer.rows.tolist() == [[3, 4], [5, 6]]
    assert answer.scores.tolist() == [[3, 4], [5, 6]]
    assert answer.vectors.size == 0
    assert engine.reported[0] == (2, 0)


def test_requests_that_arrive_during_a_batch_form_the_next_one(engine: Running) -> None:
    with engine.worker() as first, engine.worker() as second:
        block_device(engine, first)
        first.send_request(1, 1)
        second.send_request(1, 2, 3)
        second.send_request(2, 4, k=5)
        engine.device.gate.set()
        assert [first.answer().number, first.answer().number] == [0, 1]
        answers = [second.answer(), second.answer()]
    assert [answer.rows.shape for answer in answers] == [(2, 2), (1, 5)]
    assert answers[1].rows.tolist() == [[4, 5, 6, 7, 8]]
    assert sorted(map(sorted, engine.device.batches)) == [[1, 2, 3, 4], [50]]


def test_online_requests_run_before_bulk_requests(engine: Running) -> None:
    with engine.worker() as first, engine.worker() as second:
        block_device(engine, first)
        for number in range(1, 6):
            first.send_request(number, *range(10 * number, 10 * number + 4), bulk=True)
        second.send_request(1, 1)
        engine.device.gate.set()
        assert second.answer().rows[0, 0] == 1
        assert [first.answer().number for _ in range(6)] == list(range(6))
    single = next(batch for batch in engine.device.batches if 1 in batch)
    assert len(single) <= 5


def test_embeddings_are_returned_only_if_requested(engine: Running) -> None:
    with engine.worker() as worker:
        block_device(engine, worker)
        worker.send_request(1, 7, k=0, keep_vectors=True)
        worker.send_request(2, 8, k=1, keep_vectors=True)
        worker.send_request(3, 9, k=1)
        engine.device.gate.set()
        answers = {answer.number: answer for answer in (worker.answer() for _ in range(4))}
    assert answers[1].vectors.tolist() == [[7, 7]]
    assert answers[1].rows.size == 0
    assert answers[2].vectors.tolist() == [[8, 8]]
    assert answers[2].rows.tolist() == [[8]]
    assert answers[3].vectors.size == 0


def test_given_embeddings_are_searched_without_encoding(engine: Running) -> None:
    with engine.worker() as worker:
        request = Request(1, 1, 2, vectors=np.array([[4, 4], [6, 6]], np.float32))
        worker.connection.sendall(frames.write_request(request))
        assert worker.answer().rows.tolist() == [[4, 5], [6, 7]]
    assert engine.device.batches == []


def test_an_expired_request_is_not_computed(engine: Running) -> None:
    with engine.worker() as worker:
        block_device(engine, worker)
        worker.send_request(1, 1, deadline=time.monotonic() - 1)
        worker.send_request(2, 2)
        engine.device.gate.set()
        answers = {answer.number: answer.status for answer in (worker.answer() for _ in range(3))}
    assert answers == {0: Status.DONE, 1: Status.EXPIRED, 2: Status.DONE}
    assert engine.device.batches == [[50], [2]]


def test_requests_of_a_worker_that_left_are_not_computed(engine: Running) -> None:
    with engine.worker() as stays:
        with engine.worker() as leaves:
            leaves.send_request(0, 1)
            leaves.answer()  # by now the engine knows this worker
            block_device(engine, stays)
            for number in range(1, 4):
                leaves.send_request(number, *range(10 * number, 10 * number + 8))
        engine.device.gate.set()
        stays.answer()
        stays.send_request(1, 2)
        stays.answer()
    computed = {query for batch in engine.device.batches for query in batch}
    # The first of its batches may begin before the end of its connection is read.
    assert not computed & {*range(20, 28), *range(30, 38)}


def test_a_failing_request_does_not_fail_the_others_of_its_batch(
    engine: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.worker() as worker:
        block_device(engine, worker)
        for number, query in enumerate([1, POISON, 2], start=1):
            worker.send_request(number, query)
        engine.device.gate.set()
        answers = {answer.number: answer.status for answer in (worker.answer() for _ in range(4))}
    assert answers == {0: Status.DONE, 1: Status.DONE, 2: Status.FAILED, 3: Status.DONE}
    assert "the device fell over" in caplog.text


def test_a_request_for_a_serving_that_is_not_open_gets_status_unknown_serving(engine: Running) -> None:
    with engine.worker() as worker:
        worker.send_request(1, 1, handle=99)
        assert worker.answer().status is Status.UNKNOWN_SERVING


def test_a_health_check_runs_first_and_uses_the_device(engine: Running) -> None:
    with engine.worker() as worker, engine.worker() as watchdog:
        block_device(engine, worker)
        for number in range(1, 4):
            worker.send_request(number, *range(10 * number, 10 * number + 8))
        watchdog.send_control(Kind.CHECK, 5)
        engine.device.gate.set()
        answer = watchdog.answer()
        assert (answer.number, answer.status) == (5, Status.DONE)
        for _ in range(4):
            worker.answer()
    assert engine.device.batches[1] == [1]


def test_a_health_check_without_servings_is_answered(engine: Running) -> None:
    engine.servings.held.clear()
    with engine.worker() as watchdog:
        watchdog.send_control(Kind.CHECK, 1)
        assert watchdog.answer().status is Status.DONE


def test_a_serving_that_is_already_open_is_granted_at_once(engine: Running) -> None:
    with engine.worker() as worker:
        worker.send_control(Kind.OPEN, 4, OPEN)
        body = worker.body()
        assert frames.kind_of(body) is Kind.OPENED
        assert frames.read_control(body) == (4, 1)
        assert engine.servings.held[1].holders == 1
        worker.send_control(Kind.RELEASE, 0, 1)
        worker.send_control(Kind.RELEASE, 0, 1)  # a serving that is not held cannot be released
        worker.send_request(1, 1)
        worker.answer()
        assert engine.servings.released == [1]


def test_a_serving_is_opened_once_for_all_workers_while_requests_are_answered(engine: Running) -> None:
    with engine.worker() as first, engine.worker() as second:
        first.send_control(Kind.OPEN, 1, CLOSED)
        second.send_control(Kind.OPEN, 2, CLOSED)
        first.send_request(9, 1)
        assert first.answer().status is Status.DONE
        second.send_request(9, 1)
        assert second.answer().status is Status.DONE
        assert engine.servings.asked == [CLOSED]
        engine.servings.opening.set_result(engine.servings.make(2))
        assert frames.read_control(first.body()) == (1, 2)
        assert frames.read_control(second.body()) == (2, 2)


def test_a_serving_that_cannot_be_opened_is_refused_with_the_reason(
    engine: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.worker() as worker:
        worker.send_control(Kind.OPEN, 1, CLOSED)
        worker.send_request(9, 1)
        worker.answer()
        engine.servings.opening.set_exception(ValueError("no such thing"))
        body = worker.body()
        assert frames.kind_of(body) is Kind.REFUSED
        assert frames.read_control(body) == (1, ["ValueError", "no such thing"])
    assert "no such thing" in caplog.text


def test_servings_of_a_worker_that_left_are_released(engine: Running) -> None:
    with engine.worker() as worker:
        worker.send_control(Kind.OPEN, 1, OPEN)
        worker.body()
    with engine.worker() as other:
        deadline = time.monotonic() + WAIT_SECONDS
        while not engine.servings.released and time.monotonic() < deadline:
            other.send_request(1, 1)
            other.answer()
    assert engine.servings.released == [1]


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff", b"\1\0\0\0\x63", b"\2\0\0\0\1\1"])
def test_a_connection_with_another_protocol_is_closed(
    engine: Running, nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with engine.worker() as worker, engine.worker() as other:
        worker.connection.sendall(nonsense)
        assert worker.is_closed()
        other.send_request(1, 1)
        assert other.answer().status is Status.DONE


def test_a_worker_that_reads_slowly_gets_everything_and_does_not_delay_others(engine: Running) -> None:
    with engine.worker() as slow, engine.worker() as quick:
        for number in range(40):
            slow.send_request(number, 1, k=20_000)
        for number in range(5):
            quick.send_request(number, 2)
            assert quick.answer().number == number
        assert sorted(slow.answer().number for _ in range(40)) == list(range(40))


def test_the_engine_ends_with_its_supervisor_once_the_workers_have_left(tmp_path: Path) -> None:
    ours, its = socket.socketpair()
    engine = Running(tmp_path, SupervisorPipe(its))
    with its, engine.listener, engine.worker() as worker:
        worker.send_request(1, 1)
        worker.answer()
        ours.close()
        worker.send_request(2, 1)
        assert worker.answer().number == 2
        worker.connection.close()
        assert engine.is_over()


def test_a_worker_that_connects_as_the_engine_ends_is_closed(tmp_path: Path) -> None:
    engine = Running(tmp_path)
    with engine.listener, engine.worker() as first:
        block_device(engine, first)
        with engine.worker(accepted=False) as last:
            engine.server.end()
            engine.device.gate.set()
            assert engine.is_over()
            assert last.is_closed()
    gc.collect()  # a connection that is still open warns here, and a warning fails the test
