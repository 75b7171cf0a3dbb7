"""The items of one request: order, windows, patience and what is left behind when somebody stops."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import cast

import numpy as np
import pytest

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens
from service.engine.jobs import BatchTimes, EncodeJob, Found, Job, Outcome
from service.errors import DeadlineExceeded, EngineFailed, Overloaded
from service.line import PORTION, WINDOW, Deadline, Line, Prepared
from tests.unit.service.support import serving

pytestmark = pytest.mark.anyio

NOTHING = Found(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


class Desk:
    """A dispatcher that answers when it is told to, and remembers what it was handed."""

    def __init__(self, room: int = 10_000, *, answers: bool = True) -> None:
        self.room = room
        self.answers = answers
        self.times = BatchTimes(0.0, 0.0)
        self.futures: list[asyncio.Future[Outcome]] = []
        self.calls: list[dict[str, object]] = []

    @property
    def open(self) -> list[asyncio.Future[Outcome]]:
        return [future for future in self.futures if not future.done()]

    def submit(self, serving: object, jobs: Sequence[Job], **call: object) -> list[asyncio.Future[Outcome]]:
        if len(self.open) + len(jobs) > self.room:
            raise Overloaded("full")
        self.calls.append(call | {"jobs": len(jobs)})
        futures = [asyncio.get_running_loop().create_future() for _ in jobs]
        self.futures += futures
        if self.answers:
            for future in futures:
                future.get_loop().call_soon(self.answer, future)
        return futures

    def answer(self, future: asyncio.Future[Outcome]) -> None:
        if not future.done():
            future.set_result(Outcome(NOTHING, self.times))

    def __len__(self) -> int:
        return len(self.open)


def line(desk: Desk, deadline: Deadline | None = None, portion: int = PORTION) -> Line:
    return Line(desk, serving(), deadline or Deadline(None, 1000), portion=portion)


async def prepare(items: Sequence[int]) -> list[Prepared[int]]:
    """Every third item needs no engine."""
    return [(None if item % 3 == 0 else job(item), item) for item in items]


def job(item: int) -> EncodeJob:
    return EncodeJob(str(item), Side.QUERY, Tokens([item], truncated=False))


def finish(note: int, outcome: Outcome | None) -> int:
    assert (outcome is None) == (note % 3 == 0)
    return -note


@pytest.mark.parametrize("count", [1, 2, PORTION, PORTION + 1, 3 * WINDOW])
async def test_results_come_in_order_whole_and_streamed(count: int) -> None:
    expected = [-item for item in range(count)]
    assert await line(Desk()).run(range(count), prepare, finish) == expected
    async with aclosing(line(Desk()).stream(range(count), prepare, finish)) as results:
        assert [result async for result in results] == expected


async def test_others_have_their_turn_beside_items_that_need_no_engine() -> None:
    turns, portions = 0, 20

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def known(items: Sequence[int]) -> list[Prepared[int]]:
        return [(None, 3 * item) for item in items]

    other = asyncio.create_task(count_turns())
    async with aclosing(line(Desk()).stream(range(portions * PORTION), known, finish)) as results:
        assert [result async for result in results] == [-3 * item for item in range(portions * PORTION)]
    other.cancel()
    assert turns >= portions


async def test_no_more_than_a_window_is_under_way() -> None:
    desk = Desk()
    most = 0
    async with aclosing(line(desk).stream(range(3 * WINDOW), prepare, finish)) as results:
        async for _ in results:
            most = max(most, len(desk))
    assert 0 < most <= WINDOW


async def test_a_portion_is_no_larger_than_the_queue() -> None:
    desk = Desk(room=5)
    assert len(await line(desk, portion=5).run(range(50), prepare, finish)) == 50
    assert max(cast(int, call["jobs"]) for call in desk.calls) <= 5


async def test_a_request_under_way_waits_for_room() -> None:
    desk = Desk(room=PORTION + 1)
    assert len(await line(desk).run(range(5 * PORTION), prepare, finish)) == 5 * PORTION


async def test_without_room_for_its_first_portion_a_request_is_refused() -> None:
    with pytest.raises(Overloaded):
        await line(Desk(room=0)).run([1], prepare, finish)
    with pytest.raises(Overloaded):
        await line(Desk(room=0)).run(range(100), prepare, finish)


async def test_what_needs_no_engine_is_not_handed_in() -> None:
    desk = Desk(room=0)
    assert await line(desk).run([0, 3, 6], prepare, finish) == [0, -3, -6]
    assert desk.calls == []


@pytest.mark.parametrize("count", [5, 3 * WINDOW])
async def test_a_failure_leaves_nothing_behind(count: int) -> None:
    desk = Desk(answers=False)
    task = asyncio.create_task(line(desk).run(range(count), prepare, finish))
    while not desk.futures:
        await asyncio.sleep(0)
    desk.futures[0].set_exception(EngineFailed("gone"))
    with pytest.raises(EngineFailed):
        await task
    assert desk.open == []


@pytest.mark.parametrize("count", [5, 3 * WINDOW])
async def test_a_cancelled_request_leaves_nothing_behind(count: int) -> None:
    desk = Desk(answers=False)
    task = asyncio.create_task(line(desk).run(range(count), prepare, finish))
    while not desk.futures:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert desk.open == []


async def test_whoever_stops_early_leaves_nothing_behind() -> None:
    desk = Desk(answers=False)
    async with aclosing(line(desk).stream(range(100), prepare, finish)) as results:
        assert await anext(results) == 0  # the first needs no engine
        assert desk.open
    assert desk.open == []


async def test_what_the_dispatcher_is_told() -> None:
    desk = Desk()
    await Line(desk, serving(), Deadline(None, 2000), bulk=True).run([1], prepare, finish)
    assert desk.calls == [{"jobs": 1, "timeout_seconds": 2.0, "bulk": True, "probe": False}]
    await Line(desk, serving(), Deadline(60_000, 2000), probe=True).run([1], prepare, finish)
    assert 2 < cast(float, desk.calls[1]["timeout_seconds"]) <= 60
    assert desk.calls[1]["probe"]


async def test_a_request_whose_time_is_over_hands_in_nothing() -> None:
    desk = Desk()
    over = Deadline(1, 2000)
    await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded):
        await line(desk, over).run([1], prepare, finish)
    assert desk.calls == []


async def test_batches_are_counted_once() -> None:
    desk = Desk()
    under_way = line(desk)
    await under_way.run(range(10), prepare, finish)
    assert under_way.batches == [desk.times]
    assert under_way.waited_seconds > 0
