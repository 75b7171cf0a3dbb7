"""A running batcher, and an engine that is kept busy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from service.engine.jobs import Outcome
from service.engine.local import Batcher
from service.engine.queue import Limits
from tests.unit.service.support import FakeEngine, jobs, serving

ROOMY = Limits(batch_queries=8, batch_tokens=1000, queue=100)


@contextlib.asynccontextmanager
async def started(engine: FakeEngine, limits: Limits = ROOMY) -> AsyncIterator[Batcher]:
    batcher = Batcher(engine, limits)
    batcher.start()
    try:
        yield batcher
    finally:
        engine.release()
        await batcher.close()


async def busy(engine: FakeEngine, batcher: Batcher, one: object = None) -> asyncio.Future[Outcome]:
    """Puts one query into the engine and blocks it there, so that later queries have to wait."""
    engine.hold()
    (future,) = batcher.submit(one or serving("busy"), jobs("held"))  # type: ignore[arg-type]
    await asyncio.to_thread(engine.wait_until_entered)
    return future


def scores(outcomes: list[Outcome]) -> list[float]:
    return [float(outcome.found.scores[0]) for outcome in outcomes]
