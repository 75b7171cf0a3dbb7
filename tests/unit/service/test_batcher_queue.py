"""Admission control by expected wait, by count and by deadline, with a fake clock."""

from __future__ import annotations

import asyncio
import math

import pytest

from models.encoder.tokenizer import Tokens
from service.engine.jobs import Outcome, PairJob
from service.engine.queue import ONLINE_JOBS, Limits, Queue
from service.errors import DeadlineExceeded, Overloaded
from service.serving.serving import Serving
from tests.unit.service.support import Clock, job, jobs, serving

pytestmark = pytest.mark.anyio

LIMITS = Limits(batch_queries=4, batch_tokens=1000, queue=100, wait_seconds=0.1)
ONE = serving()


def queue_that_takes(seconds_per_query: float, clock: Clock, limits: Limits = LIMITS) -> Queue:
    queue = Queue(limits, clock)
    for size in (1, 2, 3, 4) * 10:
        queue.cost.observe(size, size * seconds_per_query)
    return queue


def enter(queue: Queue, *queries: str, of: Serving = ONE, **how: object) -> list[asyncio.Future[Outcome]]:
    futures: list[asyncio.Future[Outcome]] = [asyncio.get_running_loop().create_future() for _ in queries]
    queue.enter(of, jobs(*queries), futures, **how)  # type: ignore[arg-type]
    return futures


def enter_each(queue: Queue, *queries: str) -> list[asyncio.Future[Outcome]]:
    """Enters each query as a request of its own."""
    return [future for query in queries for future in enter(queue, query)]


def names(count: int, prefix: str = "q") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


async def test_as_many_jobs_as_can_be_answered_in_time_are_admitted() -> None:
    queue = queue_that_takes(0.010, Clock())
    for number in range(10):
        enter(queue, f"q{number}")
    with pytest.raises(Overloaded) as refused:
        enter(queue, "one too many")
    assert refused.value.expected_seconds == pytest.approx(0.11)
    assert len(queue) == 10


async def test_jobs_in_the_engine_count_until_they_are_done() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter_each(queue, *names(8))
    batch = queue.take()
    enter_each(queue, "a", "b")
    with pytest.raises(Overloaded):
        enter(queue, "c")
    queue.leave(batch)
    enter(queue, "c")


async def test_one_batch_of_requests_is_always_admitted_however_slow_the_engine() -> None:
    queue = queue_that_takes(10.0, Clock())
    enter_each(queue, *names(4))
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


@pytest.mark.parametrize("jobs_each", [1, 3, ONLINE_JOBS])
async def test_the_admitted_number_of_requests_is_never_refused_however_many_jobs_each_has(jobs_each: int) -> None:
    queue = queue_that_takes(10.0, Clock(), Limits(4, 1000, queue=200, wait_seconds=0.05, crowd=16))
    for number in range(16):
        enter(queue, *names(jobs_each, f"{number}-"))
    with pytest.raises(Overloaded):
        enter(queue, *names(jobs_each, "one too many"))


async def test_equal_jobs_in_flight_count_once_and_are_never_refused() -> None:
    queue = queue_that_takes(10.0, Clock())
    enter_each(queue, *names(4))
    for _ in range(1000):
        enter_each(queue, *names(4))
    assert queue.in_flight == 4
    queue.require_room(ONE, jobs("q0"))
    with pytest.raises(Overloaded):
        queue.require_room(ONE, jobs("other"))
    queue.leave(queue.take())
    queue.require_room(ONE, jobs("other"))


async def test_refused_requests_leave_no_trace() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter_each(queue, *names(10))
    for number in range(1000):
        with pytest.raises(Overloaded):
            enter(queue, f"refused {number}")
    while batch := queue.take():
        queue.leave(batch)
    enter_each(queue, *names(10, "next"))
    assert queue.in_flight == 10


async def test_before_the_first_measurement_only_the_count_limits() -> None:
    queue = Queue(Limits(4, 1000, queue=20, wait_seconds=0.001), Clock())
    enter(queue, *names(20))
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


async def test_waiting_bulk_jobs_do_not_refuse_online_jobs() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(50, "bulk"), bulk=True)
    for number in range(10):
        enter(queue, f"q{number}")
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


async def test_bulk_jobs_are_refused_only_by_their_own_deadline() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(50, "a"), timeout_seconds=0.6, bulk=True)
    with pytest.raises(Overloaded):
        enter(queue, *names(20, "b"), timeout_seconds=0.6, bulk=True)
    enter(queue, *names(20, "b"), timeout_seconds=1.0, bulk=True)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(6))
    with pytest.raises(Overloaded):
        enter(queue, "hurried", timeout_seconds=0.05)
    enter(queue, "patient", timeout_seconds=0.08)


async def test_bulk_jobs_stay_queued_unless_requested() -> None:
    queue = Queue(LIMITS, Clock())
    enter(queue, "first", bulk=True)
    enter(queue, *names(9))
    order = []
    while batch := queue.take(bulk=False):
        order += [entry.job.query for entry in batch]  # type: ignore[union-attr]
    assert order == names(9)
    assert [entry.job.query for entry in queue.take()] == ["first"]  # type: ignore[union-attr]


async def test_bulk_jobs_are_sorted_by_length() -> None:
    queue = Queue(LIMITS, Clock())
    lengths = [5, 1, 9, 3, 7, 2, 8, 6, 4, 1]
    futures: list[asyncio.Future[Outcome]] = [asyncio.get_running_loop().create_future() for _ in lengths]
    queue.enter(ONE, [job(f"q{place}", length) for place, length in enumerate(lengths)], futures, bulk=True)
    taken = []
    while batch := queue.take():
        taken += [entry.length for entry in batch]
    assert taken == sorted(lengths)


async def test_an_online_query_does_not_wait_for_an_equal_bulk_query() -> None:
    queue = Queue(LIMITS, Clock())
    enter(queue, *names(20), bulk=True)
    enter(queue, "q19")
    assert queue.take()[0].job.query == "q19"  # type: ignore[union-attr]


async def test_an_expired_job_is_dropped_and_its_waiter_gets_an_error() -> None:
    clock = Clock()
    queue = Queue(LIMITS, clock)
    (late,), (patient,) = enter(queue, "late", timeout_seconds=1), enter(queue, "patient", timeout_seconds=5)
    clock.now += 2
    assert [entry.job.query for entry in queue.take()] == ["patient"]  # type: ignore[union-attr]
    assert queue.expire() is True
    assert isinstance(late.exception(), DeadlineExceeded)
    assert not patient.done()


async def test_each_waiter_of_a_shared_job_has_a_deadline_of_its_own() -> None:
    clock = Clock()
    queue = Queue(LIMITS, clock)
    (hurried,), (patient,) = enter(queue, "same", timeout_seconds=1), enter(queue, "same", timeout_seconds=5)
    clock.now += 2
    queue.expire()
    assert isinstance(hurried.exception(), DeadlineExceeded)
    assert len(queue.take()) == 1
    assert not patient.done()


async def test_a_waiter_of_a_job_in_the_engine_gets_an_error_at_its_deadline() -> None:
    clock = Clock()
    queue = Queue(LIMITS, clock)
    (future,) = enter(queue, "q", timeout_seconds=1)
    batch = queue.take()
    clock.now += 2
    assert queue.expire() is True
    assert isinstance(future.exception(), DeadlineExceeded)
    queue.leave(batch)
    assert queue.expire() is False


async def test_expired_jobs_free_their_places() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    late = enter(queue, *names(8), timeout_seconds=0.5)
    clock.now += 1
    enter(queue, *names(8, "fresh"))
    queue.expire()
    assert all(isinstance(future.exception(), DeadlineExceeded) for future in late)


async def test_queries_of_other_workers_count_until_they_should_be_done() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    enter_each(queue, *names(4))
    queue.others_wait(20)
    with pytest.raises(Overloaded) as refused:
        enter(queue, "q")
    assert refused.value.expected_seconds == pytest.approx(0.25)
    clock.now += 0.16
    enter(queue, "q")


async def test_without_a_time_limit_only_the_count_limits() -> None:
    queue = queue_that_takes(10.0, Clock(), Limits(4, 1000, queue=50, wait_seconds=math.inf))
    enter(queue, *names(50))
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


async def test_time_already_spent_on_the_current_batch_is_subtracted_from_the_wait() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    enter(queue, *names(6))
    queue.take()  # four of the queries
    clock.now += 0.025
    with pytest.raises(Overloaded) as hurried:
        enter(queue, "hurried", timeout_seconds=0.04)
    assert hurried.value.expected_seconds == pytest.approx(0.045)
    clock.now += 1.0  # however late the batch is, the other jobs come after it
    with pytest.raises(Overloaded) as late:
        enter(queue, "late", timeout_seconds=0.02)
    assert late.value.expected_seconds == pytest.approx(0.03)


def pair(tokens: int, name: str) -> PairJob:
    return PairJob(name.encode(), Tokens([1] * tokens, truncated=False))


async def test_pairs_count_as_queries_by_their_tokens() -> None:
    queue = queue_that_takes(0.010, Clock())
    future = asyncio.get_running_loop().create_future()
    queue.enter(ONE, [pair(160, "a")], [future])  # counts as five queries
    assert len(queue) == 5
    enter_each(queue, *names(5))
    with pytest.raises(Overloaded) as refused:
        enter(queue, "one too many")
    assert refused.value.expected_seconds == pytest.approx(0.11)
    # A job beyond the batch limit runs alone.
    assert [entry.job for entry in queue.take()] == [pair(160, "a")]
    assert [len(queue.take()), len(queue.take())] == [4, 1]
    assert queue.clear()
    assert enter(queue, "again")
