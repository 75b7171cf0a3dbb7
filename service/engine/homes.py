"""Where the engine lives: in this process, or in one of its own that this process asks over a socket.

The two differ in who loads the weights and in who makes the batches; the rest of the service cannot tell.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from models.reader import TextReader
from service.engine.protocol import Dispatcher
from service.engine.queue import Limits
from service.engine.remote import RemoteEngine
from service.metrics import Metrics
from service.serving.serving import Serving, require_query_encoder
from service.settings import Settings

# Queries and tokens of one batch: a processor gains nothing by more, a card is idle with less.
BATCHES = {"cpu": (8, 4096), "cuda": (256, 32_768)}
# Requests of one worker that are never refused for a long wait, however slow the encoder is. A card needs as many at
# once as two of its batches hold, from all workers together.
FEW_REQUESTS = 32
CROWD_BATCHES = 2


class Home(Dispatcher, Protocol):
    """A dispatcher with a beginning and an end."""

    def start(self) -> None:
        """Begins to work for the event loop that runs now."""
        ...

    async def prepare(self, serving: Serving) -> None:
        """Has the engine open what it needs to answer from this serving; raises where it cannot."""
        ...

    async def close(self, timeout_seconds: float | None = None) -> None:
        """Accepts nothing more, answers what was accepted; after the timeout the rest is refused."""
        ...


def limits_of(settings: Settings) -> Limits:
    queries, tokens = BATCHES[settings.device]
    queries = settings.batch_queries or queries
    tokens = settings.batch_tokens or tokens
    crowd = max(FEW_REQUESTS, CROWD_BATCHES * queries // settings.workers)
    return Limits(queries, tokens, settings.queue_limit, settings.max_wait_ms / 1000, crowd)


def load_encoder(settings: Settings, socket: Path | None) -> TextReader:
    """The query encoder: whole where the engine is here, else only what makes tokens."""
    folder = require_query_encoder(settings.encoder)
    if socket is not None:
        return TextReader.open(folder, device=settings.device)
    from models.onnx_encoder import OnnxEncoder  # a worker that does not compute must not pay for it

    return OnnxEncoder.load(folder, threads=settings.encoder_threads)


def open_home(settings: Settings, metrics: Metrics, socket: Path | None) -> Home:
    """The engine behind `socket`, or one of this process's own."""
    if socket is not None:
        return RemoteEngine(socket, limits_of(settings), metrics.waiting)
    from service.engine.batcher import Batcher
    from service.engine.device import Cpu
    from service.engine.devices import searched_by
    from service.engine.inprocess import InProcessEngine

    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // settings.workers)
    engine = InProcessEngine(searched_by(Cpu(threads=threads), settings.database))
    return Batcher(engine, limits_of(settings), metrics.batch)
