"""Who is let in: by expected wait, by count, by deadline; with a clock that the test turns."""

from __future__ import annotations

import asyncio
import contextlib
import math

import pytest

from service.engine.pressure import Pressure
from service.engine.protocol import Outcome
from service.engine.queue import JOBS_UNDER_PRESSURE, ONLINE_JOBS, Entry, Limits, Queue
from service.errors import DeadlineExceeded, Overloaded
from service.serving import Serving
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


def names(count: int, prefix: str = "q") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


async def test_as_much_as_can_be_answered_in_time_is_let_in() -> None:
    queue = queue_that_takes(0.010, Clock())
    for number in range(10):
        enter(queue, f"q{number}")
    with pytest.raises(Overloaded) as refused:
        enter(queue, "one too many")
    assert refused.value.expected_seconds == pytest.approx(0.11)
    assert len(queue) == 10


async def test_what_is_in_the_engine_counts_until_it_left() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(8))
    batch = queue.take()
    enter(queue, "a", "b")
    with pytest.raises(Overloaded):
        enter(queue, "c")
    queue.leave(batch)
    enter(queue, "c")


async def test_one_batch_is_always_let_in_however_slow_the_engine() -> None:
    queue = queue_that_takes(10.0, Clock())
    enter(queue, *names(4))
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


async def test_before_anything_was_measured_only_the_count_decides() -> None:
    queue = Queue(Limits(4, 1000, queue=20, wait_seconds=0.001), Clock())
    enter(queue, *names(20), bulk=False)
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


async def test_bulk_jobs_that_wait_keep_no_online_job_out() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(50, "bulk"))
    for number in range(10):
        enter(queue, f"q{number}")
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


async def test_bulk_jobs_are_held_to_their_own_deadline_only() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(50, "a"), timeout_seconds=0.6)
    with pytest.raises(Overloaded):
        enter(queue, *names(20, "b"), timeout_seconds=0.6)
    enter(queue, *names(20, "b"), timeout_seconds=1.0)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(6))
    with pytest.raises(Overloaded):
        enter(queue, "hurried", timeout_seconds=0.05)
    enter(queue, "patient", timeout_seconds=0.08)


async def test_the_size_of_a_request_says_that_it_is_bulk_unless_the_request_does() -> None:
    queue = Queue(LIMITS, Clock())
    enter(queue, *names(ONLINE_JOBS + 1, "many"))
    enter(queue, *names(ONLINE_JOBS, "few"))
    enter(queue, "first", bulk=True)
    enter(queue, *names(ONLINE_JOBS + 1, "told"), bulk=False)
    order = []
    while batch := queue.take(bulk=False):
        order += [entry.job.query for entry in batch]  # type: ignore[union-attr]
    assert order == names(ONLINE_JOBS, "few") + names(ONLINE_JOBS + 1, "told")


async def test_bulk_jobs_of_like_length_are_neighbours() -> None:
    queue = Queue(LIMITS, Clock())
    lengths = [5, 1, 9, 3, 7, 2, 8, 6, 4, 1]
    futures: list[asyncio.Future[Outcome]] = [asyncio.get_running_loop().create_future() for _ in lengths]
    queue.enter(ONE, [job(f"q{place}", length) for place, length in enumerate(lengths)], futures)
    taken = []
    while batch := queue.take():
        taken += [entry.length for entry in batch]
    assert taken == sorted(lengths)


async def test_an_online_query_does_not_wait_with_its_bulk_twin() -> None:
    queue = Queue(LIMITS, Clock())
    enter(queue, *names(20))
    enter(queue, "q19")
    assert queue.take()[0].job.query == "q19"  # type: ignore[union-attr]


async def test_an_expired_job_is_dropped_unworked_and_its_waiter_told() -> None:
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


async def test_a_waiter_in_the_engine_is_told_too() -> None:
    clock = Clock()
    queue = Queue(LIMITS, clock)
    (future,) = enter(queue, "q", timeout_seconds=1)
    batch = queue.take()
    clock.now += 2
    assert queue.expire() is True
    assert isinstance(future.exception(), DeadlineExceeded)
    queue.leave(batch)
    assert queue.expire() is False


async def test_jobs_that_expired_make_room() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    late = enter(queue, *names(8), timeout_seconds=0.5)
    clock.now += 1
    enter(queue, *names(8, "fresh"))
    queue.expire()
    assert all(isinstance(future.exception(), DeadlineExceeded) for future in late)


async def test_other_workers_queries_count_until_they_must_be_done() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    queue.others_wait(20)
    with pytest.raises(Overloaded) as refused:
        enter(queue, "q")
    assert refused.value.expected_seconds == pytest.approx(0.21)
    clock.now += 0.15
    enter(queue, "q")


async def test_without_a_limit_of_time_nothing_is_refused_but_by_count() -> None:
    queue = queue_that_takes(10.0, Clock(), Limits(4, 1000, queue=50, wait_seconds=math.inf))
    enter(queue, *names(50), bulk=False)
    with pytest.raises(Overloaded):
        enter(queue, "one too many")


async def test_a_request_can_be_refused_before_any_work_is_spent_on_it() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    queue.require_room()
    enter(queue, *names(10), bulk=False)
    with pytest.raises(Overloaded) as refused:
        queue.require_room()
    assert refused.value.expected_seconds == pytest.approx(0.11)
    queue.leave(queue.take())
    queue.require_room()
    queue.require_room(inside=4)
    with pytest.raises(Overloaded):
        queue.require_room(inside=10)  # none of which has a job here yet


class OneByOne:
    """An engine that is done with one job whenever it is told."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._batch: list[Entry] = []

    def take(self) -> None:
        self._batch = self._batch or self._queue.take()

    def finish_one(self) -> None:
        self.take()
        self._queue.leave([self._batch.pop(0)])
        self.take()


async def flood(queue: Queue, clock: Clock, milliseconds: int) -> list[asyncio.Future[Outcome]]:
    """A job a millisecond, and one done every ten; the futures of those that were let in."""
    engine, let_in = OneByOne(queue), []
    for _ in range(milliseconds):
        clock.now += 0.001
        with contextlib.suppress(Overloaded):
            queue.require_room()
            let_in += enter(queue, f"q{len(let_in)}")
            engine.take()
        if round(clock.now * 1000) % 10 == 0:
            engine.finish_one()
    return let_in


def refused(futures: list[asyncio.Future[Outcome]]) -> list[bool]:
    return [future.done() and isinstance(future.exception(), Overloaded) for future in futures]


async def test_while_far_more_arrives_than_is_done_only_few_are_let_in_and_answered_soon() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    let_in = await flood(queue, clock, 300)
    assert queue.in_flight <= JOBS_UNDER_PRESSURE + 1  # the next one comes in before the engine is done
    assert len(let_in) < 60
    assert sum(refused(let_in)) < 15
    clock.now += 2.0  # the flood is over
    enter(queue, *names(6, "after"))


async def test_whoever_waits_since_before_the_flood_was_seen_is_refused_with_it() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    probe = enter(queue, "probe", probe=True)
    bulk = enter(queue, *names(20, "bulk"))
    first = enter(queue, *names(8, "first"))
    engine_has = [entry.job for entry in queue.take()]
    assert engine_has == jobs("probe", *names(3, "first"))
    probe += enter(queue, "second probe", probe=True)
    for _ in range(100):
        clock.now += 0.001
        with contextlib.suppress(Overloaded):
            queue.require_room()
    assert refused(first) == [False] * 3 + [True] * 5  # what is in the engine is computed
    assert not any(refused(probe + bulk))
    assert queue.take()[0].job == job("second probe")


async def test_a_crowd_that_came_at_once_costs_nobody_inside_his_place() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock, Limits(4, 1000, queue=100, wait_seconds=0.05, crowd=16))
    inside = enter(queue, *names(8, "a"), bulk=False) + enter(queue, *names(8, "b"), bulk=False)
    for _ in range(100):
        with pytest.raises(Overloaded):
            queue.require_room()
    engine = OneByOne(queue)
    for _ in range(16):
        clock.now += 0.010
        engine.finish_one()
    assert not any(refused(inside))
    assert queue.in_flight == 0


async def test_what_the_engine_spent_on_its_batch_is_not_waited_for_again() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    enter(queue, *names(6))
    queue.take()  # four of them
    clock.now += 0.025
    with pytest.raises(Overloaded) as hurried:
        enter(queue, "hurried", timeout_seconds=0.04)
    assert hurried.value.expected_seconds == pytest.approx(0.045)
    clock.now += 1.0  # however late the batch is, the others come after it
    with pytest.raises(Overloaded) as late:
        enter(queue, "late", timeout_seconds=0.02)
    assert late.value.expected_seconds == pytest.approx(0.03)


async def test_clients_that_wait_for_their_answers_are_no_pressure() -> None:
    clock = Clock()
    queue = queue_that_takes(0.010, clock)
    engine = OneByOne(queue)
    enter(queue, *names(9, "first"), bulk=False)
    for number in range(200):  # whoever is answered asks again
        clock.now += 0.010
        engine.finish_one()
        enter(queue, f"q{number}")


async def test_who_was_refused_unasked_is_pressure_too() -> None:
    queue = queue_that_takes(0.010, Clock())
    enter(queue, *names(8))
    queue.require_room()
    with pytest.raises(Overloaded):
        queue.require_room(unasked=50)


def test_pressure_is_forgotten() -> None:
    pressure = Pressure()
    pressure.arrive(100, 1.0)
    assert not pressure.is_high(1.0, slack=100)
    assert pressure.is_high(1.0, slack=99)
    pressure.finish(50, 1.0)
    assert not pressure.is_high(1.0, slack=25)
    assert pressure.is_high(1.0, slack=24)
    assert not pressure.is_high(3.0, slack=1)
