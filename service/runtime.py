"""The running parts of one service, put together and taken apart. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from indexer.store.collection import Collection
from service.cache import Cache
from service.embed import Embedder
from service.engine.homes import load_encoder, open_home
from service.fresh.encode import DocumentEncoder
from service.fresh.follow import Freshener
from service.fresh.write import FreshWriter
from service.metrics import Metrics
from service.search import Searcher
from service.serving import Serving
from service.settings import Settings
from service.swap import Opening, Servings

if TYPE_CHECKING:
    from service.hyde import Hyde


@dataclass(frozen=True, slots=True)
class Runtime:
    """What the routes work with."""

    settings: Settings
    metrics: Metrics
    searcher: Searcher
    embedder: Embedder
    servings: Servings
    writer: FreshWriter


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among others.

    `engine` is the socket of the process that computes, where this one does not. `tell_others` has the other workers
    look at the pointer. `again`: this process takes the place of one that ended.
    """

    engine: Path | None = None
    tell_others: Callable[[], None] = lambda: None
    again: bool = False


ALONE = Place()


@contextlib.asynccontextmanager
async def run_parts(settings: Settings, metrics: Metrics, place: Place = ALONE) -> AsyncIterator[Runtime]:
    """Opens encoder and snapshot, starts batcher and poller; at the end answers what was accepted, then stops them."""
    load = partial(load_encoder, settings, place.engine)
    encoder = await asyncio.to_thread(load)
    batcher = open_home(settings, metrics, place.engine)
    cache = Cache.from_settings(settings, metrics)
    embedder = Embedder(settings, batcher, cache)
    hyde = _open_hyde(settings)
    searcher = Searcher(settings, batcher, cache, metrics, embedder, hyde)

    documents = DocumentEncoder(settings, embedder)
    log = Collection(settings.collection).fresh_log
    # With an engine process, that one reads every byte and searches; the workers need not do it again.
    alone = place.engine is None
    open_serving = partial(Serving.open, verify=settings.verify and alone, searched=alone)
    opening = Opening(
        load, open_serving, batcher.prepare, Freshener(log, documents), searcher.probe, searcher.check_canaries
    )
    servings = Servings(settings, metrics, encoder, opening, place.tell_others)
    metrics.watch_queue(batcher.__len__)
    if place.again:
        metrics.restart("worker")
    batcher.start()
    try:
        await servings.start()
        async with _following(servings, settings.reload_seconds):
            writer = FreshWriter(settings, servings, documents, log)
            yield Runtime(settings, metrics, searcher, embedder, servings, writer)
    finally:
        await batcher.close(settings.shutdown_seconds)
        await cache.close()
        if hyde is not None:
            await hyde.close()


def _open_hyde(settings: Settings) -> Hyde | None:
    """The language model that imagines documents, where one is configured: only then is an HTTP client loaded."""
    if settings.hyde_url is None:
        return None
    from service.hyde import Hyde

    return Hyde.open(settings)


@contextlib.asynccontextmanager
async def _following(servings: Servings, seconds: float) -> AsyncIterator[None]:
    """Follows the log, and the pointer unless `seconds` is 0, in the background."""
    tasks = [asyncio.create_task(servings.follow_log())]
    if seconds:
        tasks.append(asyncio.create_task(servings.follow_pointer(seconds)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
