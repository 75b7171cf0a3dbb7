"""The items of one request in portions: order, windows, waiting for room, clean-up after failure or cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import cast

import numpy as np
import pytest

from models.encoder.spec import Side
from models.encoder.tokenizer import Tokens
from service.engine.jobs import BatchTimes, EncodeJob, Found, Job, Outcome
from service.errors import DeadlineExceeded, EngineFailed, Overloaded
from service.search.portions import PORTION, WINDOW, Deadline, Portions, Prepared
from tests.unit.service.support import serving

pytestmark = pytest.mark.anyio

Prepare = Callable[[Sequence[int]], Awaitable[Sequence[Prepared[int]]]]
NOTHING = Found(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))


class FakeDispatcher:
    """A fake dispatcher that records its calls and answers at once, or only when a test calls `answer`."""

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


def portions(dispatcher: FakeDispatcher, deadline: Deadline | None = None, size: int = PORTION) -> Portions:
    return Portions(dispatcher, serving(), deadline or Deadline(None, 1000), size)


async def stream(request: Portions, items: Sequence[int], prepare: Prepare) -> AsyncGenerator[int, None]:
    """Yields a result per item, each as soon as it is known."""
    async with aclosing(request.outcomes(items, prepare)) as outcomes:
        async for note, outcome in outcomes:
            yield finish(note, outcome)


async def run(request: Portions, items: Sequence[int]) -> list[int]:
    """All results."""
    if len(items) <= request.size:
        return await request.single(items, prepare, finish_soon)
    async with aclosing(stream(request, items, prepare)) as results:
        return [result async for result in results]


async def finish_soon(note: int, outcome: Outcome | None) -> int:
    return finish(note, outcome)


async def prepare(items: Sequence[int]) -> list[Prepared[int]]:
    """Prepares items; every third one needs no engine."""
    return [(None if item % 3 == 0 else job(item), item) for item in items]


def job(item: int) -> EncodeJob:
    return EncodeJob(str(item), Side.QUERY, Tokens([item], truncated=False))


def finish(note: int, outcome: Outcome | None) -> int:
    assert (outcome is None) == (note % 3 == 0)
    return -note


@pytest.mark.parametrize("count", [1, 2, PORTION, PORTION + 1, 3 * WINDOW])
async def test_results_come_in_order_whole_and_streamed(count: int) -> None:
    expected = [-item for item in range(count)]
    assert await run(portions(FakeDispatcher()), range(count)) == expected
    async with aclosing(stream(portions(FakeDispatcher()), range(count), prepare)) as results:
        assert [result async for result in results] == expected


async def test_items_that_need_no_engine_do_not_block_the_event_loop() -> None:
    turns, count = 0, 20

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def known(items: Sequence[int]) -> list[Prepared[int]]:
        return [(None, 3 * item) for item in items]

    other = asyncio.create_task(count_turns())
    async with aclosing(stream(portions(FakeDispatcher()), range(count * PORTION), known)) as results:
        assert [result async for result in results] == [-3 * item for item in range(count * PORTION)]
    other.cancel()
    assert turns >= count


async def test_at_most_one_window_is_in_flight() -> None:
    dispatcher = FakeDispatcher()
    most = 0
    async with aclosing(stream(portions(dispatcher), range(3 * WINDOW), prepare)) as results:
        async for _ in results:
            most = max(most, len(dispatcher))
    assert 0 < most <= WINDOW


async def test_a_portion_is_no_larger_than_the_queue() -> None:
    dispatcher = FakeDispatcher(room=5)
    assert len(await run(portions(dispatcher, size=5), range(50))) == 50
    assert max(cast(int, call["jobs"]) for call in dispatcher.calls) <= 5


async def test_a_started_request_waits_for_room() -> None:
    dispatcher = FakeDispatcher(room=PORTION + 1)
    assert len(await run(portions(dispatcher), range(5 * PORTION))) == 5 * PORTION


async def test_a_request_without_room_for_its_first_portion_is_refused() -> None:
    with pytest.raises(Overloaded):
        await run(portions(FakeDispatcher(room=0)), [1])
    with pytest.raises(Overloaded):
        await run(portions(FakeDispatcher(room=0)), range(100))


async def test_items_that_need_no_engine_are_not_submitted() -> None:
    dispatcher = FakeDispatcher(room=0)
    assert await run(portions(dispatcher), [0, 3, 6]) == [0, -3, -6]
    assert dispatcher.calls == []


@pytest.mark.parametrize("count", [5, 3 * WINDOW])
async def test_a_failure_leaves_no_jobs(count: int) -> None:
    dispatcher = FakeDispatcher(answers=False)
    task = asyncio.create_task(run(portions(dispatcher), range(count)))
    while not dispatcher.futures:
        await asyncio.sleep(0)
    dispatcher.futures[0].set_exception(EngineFailed("gone"))
    with pytest.raises(EngineFailed):
        await task
    assert dispatcher.open == []


@pytest.mark.parametrize("count", [5, 3 * WINDOW])
async def test_a_cancelled_request_leaves_no_jobs(count: int) -> None:
    dispatcher = FakeDispatcher(answers=False)
    task = asyncio.create_task(run(portions(dispatcher), range(count)))
    while not dispatcher.futures:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert dispatcher.open == []


async def test_a_stream_that_is_closed_early_leaves_no_jobs() -> None:
    dispatcher = FakeDispatcher(answers=False)
    async with aclosing(stream(portions(dispatcher), range(100), prepare)) as results:
        assert await anext(results) == 0  # the first needs no engine
        assert dispatcher.open
    assert dispatcher.open == []


async def test_timeout_bulk_and_probe_are_passed_to_the_dispatcher() -> None:
    dispatcher = FakeDispatcher()
    await run(Portions(dispatcher, serving(), Deadline(None, 2000), bulk=True), [1])
    assert dispatcher.calls == [{"jobs": 1, "timeout_seconds": 2.0, "bulk": True, "probe": False}]
    await run(Portions(dispatcher, serving(), Deadline(60_000, 2000), probe=True), [1])
    assert 2 < cast(float, dispatcher.calls[1]["timeout_seconds"]) <= 60
    assert dispatcher.calls[1]["probe"]


async def test_the_time_of_a_portion_begins_when_those_before_it_are_done() -> None:
    dispatcher = FakeDispatcher()
    await run(Portions(dispatcher, serving(), Deadline(None, 2000), size=8), range(24))
    assert [call["timeout_seconds"] for call in dispatcher.calls] == [2.0, 4.0, 6.0]


async def test_an_expired_request_submits_nothing() -> None:
    dispatcher = FakeDispatcher()
    over = Deadline(1, 2000)
    await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded):
        await run(portions(dispatcher, over), [1])
    assert dispatcher.calls == []


async def test_batches_are_counted_once() -> None:
    dispatcher = FakeDispatcher()
    request = portions(dispatcher)
    await run(request, range(10))
    assert request.batches == [dispatcher.times]
    assert request.waited_seconds > 0
