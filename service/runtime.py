"""Opens the parts of one service, wires them together and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from indexer.store.collection import Collection
from models.encoder.pairs import PairReader
from models.encoder.spec import EncoderSpec
from models.encoder.tokenizer import TextReader
from service.cache.cache import Cache, ResultKeys
from service.engine.queue import Dispatcher, Limits
from service.engine.remote.client import RemoteEngine
from service.search.embedder import Embedder, Reranker
from service.search.searcher import Searcher
from service.serving.serving import Models, Serving, require_query_encoder
from service.updates.encoder import DocumentEncoder, freshen
from service.updates.swap import Opening, Servings
from service.updates.writer import FreshWriter

if TYPE_CHECKING:
    from service.keys import KeyRing
    from service.limits import Rates
    from service.metrics import Metrics
    from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Runtime:
    """The parts that routes work with."""

    settings: Settings
    metrics: Metrics
    searcher: Searcher
    embedder: Embedder
    servings: Servings
    writer: FreshWriter
    keys: KeyRing
    draining: threading.Event = field(default_factory=threading.Event)
    """Set between SIGTERM and the end: /readyz fails, everything else is answered."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process among others.

    `engine` is the socket of the engine process, None if this process computes. `tell_others` makes the other workers
    look at the pointer. `again`: this process replaces one that ended.
    """

    engine: Path | None = None
    tell_others: Callable[[], None] = lambda: None
    again: bool = False


ALONE = Place()


@contextlib.asynccontextmanager
async def run_parts(
    settings: Settings, metrics: Metrics, keys: KeyRing, rates: Rates, place: Place = ALONE
) -> AsyncIterator[Runtime]:
    """Opens encoder and snapshot and starts engine and pollers; at the end answers accepted requests, then stops."""
    load = partial(load_models, settings, place.engine)
    models = await asyncio.to_thread(load)
    batcher = await asyncio.to_thread(open_home, settings, metrics, place.engine)
    cache = Cache.from_settings(settings, metrics)
    embedder = Embedder(settings, batcher, cache)
    hyde = None
    if settings.hyde_url is not None:
        from service.search.hyde import Hyde  # loads an HTTP client

        hyde = Hyde(settings)
    reranker = None if settings.reranker is None else Reranker(settings, settings.reranker, batcher)
    searcher = Searcher(settings, batcher, cache, ResultKeys(settings), metrics, embedder, hyde, rates, reranker)
    documents = DocumentEncoder(settings, embedder)
    log = Collection(settings.collection).fresh_log
    # An engine process checks every byte and searches; its workers need not do it again.
    alone = place.engine is None
    open_serving = partial(Serving.open, verify=settings.verify and alone, searched=alone)
    freshened = partial(freshen, log, documents)
    opening = Opening(load, open_serving, batcher.prepare, freshened, searcher.admit, searcher.check_canaries)
    servings = Servings(settings, metrics, models, opening, place.tell_others)
    if isinstance(batcher, RemoteEngine):
        batcher.on_refused = servings.follow_now
    metrics.watch_queue(batcher.__len__)
    if place.again:
        metrics.restart("worker")
    batcher.start()
    try:
        await servings.start()
        async with _following(servings, keys, settings.reload_seconds):
            writer = FreshWriter(settings, servings, documents, log)
            yield Runtime(settings, metrics, searcher, embedder, servings, writer, keys)
    finally:
        await batcher.close(settings.shutdown_seconds)
        searcher.close()
        await cache.close()
        await embedder.close()
        await rates.close()
        if hyde is not None:
            await hyde.close()


@contextlib.asynccontextmanager
async def _following(servings: Servings, keys: KeyRing, seconds: float) -> AsyncIterator[None]:
    """Follows the log, and the pointer and the keys file unless `seconds` is 0, in the background."""
    tasks = [asyncio.create_task(servings.follow_log())]
    if seconds:
        tasks += [asyncio.create_task(work) for work in (servings.follow_pointer(seconds), keys.follow(seconds))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# The functions below import what computes only if it is needed: a worker beside an engine process must not load it.
def load_models(settings: Settings, socket: Path | None) -> Models:
    """Loads query encoder and reranker; only their tokenizers if an engine process computes behind `socket`."""
    return Models(_load_encoder(settings, socket), _load_reranker(settings, socket))


def _load_encoder(settings: Settings, socket: Path | None) -> TextReader:
    folder = require_query_encoder(settings.encoder)
    if EncoderSpec.load(folder).address is not None:
        from models.encoder.address import AddressReader

        return AddressReader.open(folder)
    if socket is not None:
        return TextReader.open(folder, device=settings.device)
    from models.encoder.onnx import OnnxEncoder

    return OnnxEncoder.load(folder, threads=settings.encoder_threads)


def _load_reranker(settings: Settings, socket: Path | None) -> PairReader | None:
    if settings.reranker is None:
        return None
    if socket is not None:
        return PairReader.open(settings.reranker, device=settings.device)
    from models.encoder.onnx import OnnxReranker

    return OnnxReranker.load(settings.reranker, threads=settings.encoder_threads)


def open_home(settings: Settings, metrics: Metrics, socket: Path | None) -> Dispatcher:
    """Opens the engine behind `socket`, or one in this process."""
    if socket is not None:
        return RemoteEngine(socket, Limits.from_settings(settings), metrics.waiting)
    from service.engine.device import Cpu, searched_by
    from service.engine.local import Batcher, InProcessEngine

    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.workers)
    engine = InProcessEngine(searched_by(Cpu(settings.encoder_threads, threads), settings.database))
    return Batcher(engine, Limits.from_settings(settings), metrics.batch)
