"""The running parts of one service, put together and taken apart. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from service.cache import Cache
from service.engine.batcher import Batcher, Limits
from service.engine.inprocess import InProcessEngine
from service.metrics import Metrics
from service.search import Searcher
from service.serving import load_query_encoder
from service.settings import Settings
from service.swap import Servings


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the routes work with."""

    settings: Settings
    metrics: Metrics
    searcher: Searcher
    servings: Servings


@contextlib.asynccontextmanager
async def run_parts(settings: Settings, metrics: Metrics) -> AsyncIterator[Runtime]:
    """Opens encoder and snapshot, starts batcher and poller; at the end answers what was accepted, then stops them."""
    encoder = await asyncio.to_thread(load_query_encoder, settings.encoder, settings.encoder_threads)
    limits = Limits(settings.batch_queries, settings.batch_tokens, settings.queue_limit)
    batcher = Batcher(InProcessEngine(settings.threads), limits, metrics.batch)
    cache = Cache.from_settings(settings, metrics)
    searcher = Searcher(settings, batcher, cache, metrics)
    servings = Servings(settings, metrics, encoder, searcher.probe)
    metrics.watch_queue(batcher.__len__)
    batcher.start()
    try:
        await servings.start()
        async with _following(servings, settings.reload_seconds):
            yield Runtime(settings, metrics, searcher, servings)
    finally:
        await batcher.close(settings.shutdown_seconds)
        await cache.close()


@contextlib.asynccontextmanager
async def _following(servings: Servings, seconds: float) -> AsyncIterator[None]:
    """Follows the pointer in the background; not at all where `seconds` is 0."""
    if not seconds:
        yield
        return
    task = asyncio.create_task(servings.follow_pointer(seconds))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
