"""The engine's side and a worker's side of the engine process, in one process, over a real socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from indexer.store.collection import Collection
from models.encoder.tokenizer import TextReader
from service.engine.device import Cpu
from service.engine.queue import Limits
from service.engine.remote.client import RemoteEngine
from service.engine.remote.server import EngineServer, OpenServings
from service.serving.serving import Serving
from service.settings import Settings
from tests.api.support import ENCODER, Built

WAIT_SECONDS = 60.0
LIMITS = Limits(batch_queries=32, batch_tokens=4096, queue=2000)


class Engine:
    """The engine's side in a thread, which can be stopped and started again at the same address."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self._settings = settings
        self.batches: list[int] = []

    def begin(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._server = EngineServer(
            self._listener, LIMITS, lambda size, tokens, seconds, waiting: self.batches.append(size)
        )
        self.servings = OpenServings(self._settings, Cpu(1, 1))
        self._listener.listen()
        self._thread = threading.Thread(target=self._server.serve, args=[self.servings], daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._server.end()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        self.servings.close()
        self._listener.close()


@contextlib.asynccontextmanager
async def worker(engine: Engine) -> AsyncIterator[RemoteEngine]:
    remote = RemoteEngine(engine.path, LIMITS)
    remote.start()
    try:
        yield remote
    finally:
        await remote.close(WAIT_SECONDS)


def open_serving(built: Built, letter: str = "a") -> Serving:
    """Opens a serving as a worker does: without the weights."""
    return Serving.open(Collection(built.root).folder(built.versions[letter]), TextReader.open(ENCODER), verify=False)
