"""The engine's loop, with a device that a test can hold still: batches across workers, order, failures, leaving."""

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


def hold(engine: Running, worker: Worker) -> None:
    """A query that stays in the device until the gate opens, so that what follows has to wait."""
    engine.device.gate.clear()
    worker.ask(0, 50)
    assert engine.device.entered.acquire(timeout=WAIT_SECONDS)


def test_a_lone_ask_is_answered(engine: Running) -> None:
    with engine.worker() as worker:
        worker.ask(7, 3, 5, k=2)
        answer = worker.answer()
        worker.ask(8, 1)  # answered after the first batch was told of, which happens once its answers are out
        worker.answer()
    assert (answer.number, answer.status, answer.batch, answer.waiting) == (7, Status.DONE, 2, 0)
    assert answer.rows.tolist() == [[3, 4], [5, 6]]
    assert answer.scores.tolist() == [[3, 4], [5, 6]]
    assert answer.vectors.size == 0
    assert engine.told[0] == (2, 0)


def test_requests_that_arrive_during_a_batch_form_the_next(engine: Running) -> None:
    with engine.worker() as first, engine.worker() as second:
        hold(engine, first)
        first.ask(1, 1)
        second.ask(1, 2, 3)
        second.ask(2, 4, k=5)
        engine.device.gate.set()
        assert [first.answer().number, first.answer().number] == [0, 1]
        answers = [second.answer(), second.answer()]
    assert [answer.rows.shape for answer in answers] == [(2, 2), (1, 5)]
    assert answers[1].rows.tolist() == [[4, 5, 6, 7, 8]]
    assert sorted(map(sorted, engine.device.batches)) == [[1, 2, 3, 4], [50]]


def test_online_asks_go_before_bulk_ones(engine: Running) -> None:
    with engine.worker() as first, engine.worker() as second:
        hold(engine, first)
        for number in range(1, 6):
            first.ask(number, *range(10 * number, 10 * number + 4), bulk=True)
        second.ask(1, 1)
        engine.device.gate.set()
        assert second.answer().rows[0, 0] == 1
        assert [first.answer().number for _ in range(6)] == list(range(6))
    single = next(batch for batch in engine.device.batches if 1 in batch)
    assert len(single) <= 5


def test_embeddings_come_back_where_they_were_asked_for(engine: Running) -> None:
    with engine.worker() as worker:
        hold(engine, worker)
        worker.ask(1, 7, k=0, keep_vectors=True)
        worker.ask(2, 8, k=1, keep_vectors=True)
        worker.ask(3, 9, k=1)
        engine.device.gate.set()
        answers = {answer.number: answer for answer in (worker.answer() for _ in range(4))}
    assert answers[1].vectors.tolist() == [[7, 7]]
    assert answers[1].rows.size == 0
    assert answers[2].vectors.tolist() == [[8, 8]]
    assert answers[2].rows.tolist() == [[8]]
    assert answers[3].vectors.size == 0


def test_ready_embeddings_are_searched_as_they_are(engine: Running) -> None:
    with engine.worker() as worker:
        ask = Request(1, 1, 2, vectors=np.array([[4, 4], [6, 6]], np.float32))
        worker.connection.sendall(frames.write_request(ask))
        assert worker.answer().rows.tolist() == [[4, 5], [6, 7]]
    assert engine.device.batches == []


def test_an_ask_whose_time_is_up_costs_no_work(engine: Running) -> None:
    with engine.worker() as worker:
        hold(engine, worker)
        worker.ask(1, 1, deadline=time.monotonic() - 1)
        worker.ask(2, 2)
        engine.device.gate.set()
        answers = {answer.number: answer.status for answer in (worker.answer() for _ in range(3))}
    assert answers == {0: Status.DONE, 1: Status.EXPIRED, 2: Status.DONE}
    assert engine.device.batches == [[50], [2]]


def test_requests_of_a_worker_that_left_are_not_computed(engine: Running) -> None:
    with engine.worker() as stays:
        with engine.worker() as leaves:
            leaves.ask(0, 1)
            leaves.answer()  # by now the engine knows this worker
            hold(engine, stays)
            for number in range(1, 4):
                leaves.ask(number, *range(10 * number, 10 * number + 8))
        engine.device.gate.set()
        stays.answer()
        stays.ask(1, 2)
        stays.answer()
    computed = {query for batch in engine.device.batches for query in batch}
    # The first of its batches may begin before its end of the connection is read.
    assert not computed & {*range(20, 28), *range(30, 38)}


def test_one_bad_ask_harms_itself_alone(engine: Running, caplog: pytest.LogCaptureFixture) -> None:
    with engine.worker() as worker:
        hold(engine, worker)
        for number, query in enumerate([1, POISON, 2], start=1):
            worker.ask(number, query)
        engine.device.gate.set()
        answers = {answer.number: answer.status for answer in (worker.answer() for _ in range(4))}
    assert answers == {0: Status.DONE, 1: Status.DONE, 2: Status.FAILED, 3: Status.DONE}
    assert "the device fell over" in caplog.text


def test_a_serving_that_is_not_open_is_said(engine: Running) -> None:
    with engine.worker() as worker:
        worker.ask(1, 1, handle=99)
        assert worker.answer().status is Status.UNKNOWN_SERVING


def test_a_check_goes_first_and_through_the_device(engine: Running) -> None:
    with engine.worker() as worker, engine.worker() as watchdog:
        # A connection that the engine has not accepted yet is read a batch later.
        watchdog.tell(Kind.CHECK, 4)
        assert watchdog.answer().number == 4
        assert engine.device.entered.acquire(timeout=WAIT_SECONDS)  # by that check, or `hold` takes it for its own
        hold(engine, worker)
        for number in range(1, 4):
            worker.ask(number, *range(10 * number, 10 * number + 8))
        watchdog.tell(Kind.CHECK, 5)
        engine.device.gate.set()
        answer = watchdog.answer()
        assert (answer.number, answer.status) == (5, Status.DONE)
        for _ in range(4):
            worker.answer()
    assert engine.device.batches[2] == [1]


def test_a_check_of_an_engine_without_servings_is_answered(engine: Running) -> None:
    engine.shelf.held.clear()
    with engine.worker() as watchdog:
        watchdog.tell(Kind.CHECK, 1)
        assert watchdog.answer().status is Status.DONE


def test_a_serving_that_is_open_is_granted_at_once(engine: Running) -> None:
    with engine.worker() as worker:
        worker.tell(Kind.OPEN, 4, OPEN)
        body = worker.body()
        assert frames.kind_of(body) is Kind.OPENED
        assert frames.read_control(body) == (4, 1)
        assert engine.shelf.held[1].holders == 1
        worker.tell(Kind.RELEASE, 0, 1)
        worker.tell(Kind.RELEASE, 0, 1)  # what is not held cannot be released
        worker.ask(1, 1)
        worker.answer()
        assert engine.shelf.released == [1]


def test_a_serving_is_opened_once_for_all_while_others_are_answered(engine: Running) -> None:
    with engine.worker() as first, engine.worker() as second:
        first.tell(Kind.OPEN, 1, CLOSED)
        second.tell(Kind.OPEN, 2, CLOSED)
        first.ask(9, 1)
        assert first.answer().status is Status.DONE
        second.ask(9, 1)
        assert second.answer().status is Status.DONE
        assert engine.shelf.asked == [CLOSED]
        engine.shelf.opening.set_result(engine.shelf.make(2))
        assert frames.read_control(first.body()) == (1, 2)
        assert frames.read_control(second.body()) == (2, 2)


def test_a_serving_that_cannot_be_opened_is_refused_with_the_reason(
    engine: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.worker() as worker:
        worker.tell(Kind.OPEN, 1, CLOSED)
        worker.ask(9, 1)
        worker.answer()
        engine.shelf.opening.set_exception(ValueError("no such thing"))
        body = worker.body()
        assert frames.kind_of(body) is Kind.REFUSED
        assert frames.read_control(body) == (1, ["ValueError", "no such thing"])
    assert "no such thing" in caplog.text


def test_servings_of_a_worker_that_left_are_released(engine: Running) -> None:
    with engine.worker() as worker:
        worker.tell(Kind.OPEN, 1, OPEN)
        worker.body()
    with engine.worker() as other:
        deadline = time.monotonic() + WAIT_SECONDS
        while not engine.shelf.released and time.monotonic() < deadline:
            other.ask(1, 1)
            other.answer()
    assert engine.shelf.released == [1]


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff", b"\1\0\0\0\x63", b"\2\0\0\0\1\1"])
def test_a_connection_that_speaks_otherwise_is_closed(
    engine: Running, nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with engine.worker() as worker, engine.worker() as other:
        worker.connection.sendall(nonsense)
        assert worker.is_cut_off()
        other.ask(1, 1)
        assert other.answer().status is Status.DONE


def test_a_worker_that_reads_slowly_gets_everything_and_delays_no_other(engine: Running) -> None:
    with engine.worker() as slow, engine.worker() as quick:
        for number in range(40):
            slow.ask(number, 1, k=20_000)
        for number in range(5):
            quick.ask(number, 2)
            assert quick.answer().number == number
        assert sorted(slow.answer().number for _ in range(40)) == list(range(40))


def test_the_engine_ends_with_its_supervisor_once_the_workers_have_left(tmp_path: Path) -> None:
    ours, its = socket.socketpair()
    engine = Running(tmp_path, SupervisorPipe(its))
    with its, engine.listener, engine.worker() as worker:
        worker.ask(1, 1)
        worker.answer()
        ours.close()
        worker.ask(2, 1)
        assert worker.answer().number == 2
        worker.connection.close()
        assert engine.is_over()


def test_a_worker_that_connects_as_the_engine_ends_is_closed(tmp_path: Path) -> None:
    engine = Running(tmp_path)
    with engine.listener, engine.worker() as first:
        hold(engine, first)
        with engine.worker() as last:
            engine.server.end()
            engine.device.gate.set()
            assert engine.is_over()
            assert last.is_cut_off()
    gc.collect()  # a connection that is still open warns here, and a warning fails the test
