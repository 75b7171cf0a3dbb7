"""Closing a batcher answers the accepted queries; an idle batcher holds no references."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref

import pytest

from service.engine.queue import Limits
from service.errors import ShuttingDown
from tests.unit.service.batching import busy, scores, started
from tests.unit.service.support import FakeEngine, jobs, score_of, serving

pytestmark = pytest.mark.anyio


async def test_closing_answers_what_was_accepted_and_refuses_the_rest() -> None:
    engine, one = FakeEngine(), serving()
    threads = set(threading.enumerate())
    async with started(engine, Limits(2, 1000, 100)) as batcher:
        held = await busy(engine, batcher, one)
        waiting = batcher.submit(one, jobs(*"abcde"))
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown):
            batcher.submit(one, jobs("late"))
        engine.release()
        await closing
        assert all(future.done() for future in [held, *waiting])
        assert scores([future.result() for future in waiting]) == [score_of(query) for query in "abcde"]
    assert not any(thread.name == "care-engine" for thread in set(threading.enumerate()) - threads)


async def test_a_hanging_engine_does_not_block_the_shutdown() -> None:
    engine, one = FakeEngine(), serving()
    async with started(engine) as batcher:
        held = await busy(engine, batcher, one)
        (waiting,) = batcher.submit(one, jobs("a"))
        await batcher.close(timeout_seconds=0.05)
        for future in (held, waiting):
            assert isinstance(future.exception(), ShuttingDown)


async def test_closing_twice_or_while_idle_works() -> None:
    async with started(FakeEngine()) as batcher:
        await batcher.close()
        await batcher.close()


@pytest.mark.parametrize("poison", [set(), {"a"}])
async def test_an_idle_batcher_keeps_no_serving_alive(poison: set[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # a log record of the failure, which pytest keeps, would hold its frames
    engine = FakeEngine()
    engine.poison = poison
    async with started(engine) as batcher:
        one = serving()
        watch = weakref.ref(one)
        await asyncio.gather(*batcher.submit(one, jobs("a")), return_exceptions=True)
        engine.batches.clear()
        del one
        await asyncio.gather(*batcher.submit(serving("other"), jobs("b")))
        gc.collect()
        assert watch() is None
