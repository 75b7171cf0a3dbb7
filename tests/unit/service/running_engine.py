"""The engine's loop in a thread, with a device that a test can block, and workers that send it requests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from models.encoder.tokenizer import Tokens
from service.engine.device import OpenServing
from service.engine.jobs import Request, Response
from service.engine.queue import Limits
from service.engine.remote import frames
from service.engine.remote.frames import FrameReader, Kind
from service.engine.remote.server import EngineServer, Name, OpenServings
from service.processes.startup import SupervisorPipe
from tests.support.waiting import wait_until

WAIT_SECONDS = 60.0
POISON = 66
LIMITS = Limits(batch_queries=8, batch_tokens=1000, queue=100)
OPEN: Name = ("open", "print", "")
CLOSED: Name = ("closed", "print", "")


class FakeDevice:
    """An encoder and an index in one: a query's embedding and its row are its first token."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.reader = SimpleNamespace(
            spec=SimpleNamespace(address=None),
            tokenize=lambda texts, side: [Tokens([1], truncated=False) for _ in texts],
        )

    def encode(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        first = ids[np.cumsum(lengths) - lengths]
        self.batches.append(first.tolist())
        self.entered.release()
        assert self.gate.wait(WAIT_SECONDS)
        if POISON in first:
            raise RuntimeError("the device fell over")
        return np.stack([first, first], axis=1).astype(np.float32)

    def search(self, queries: np.ndarray, k: int, allowed: object) -> tuple[np.ndarray, np.ndarray]:
        rows = np.repeat(queries[:, :1].astype(np.int64), k, axis=1) + np.arange(k)
        return rows.astype(np.float32), rows


class FakeServings:
    """One open serving, and others that open when the test sets the result of `opening`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.held = {1: self.make(1)}
        self.asked: list[Name] = []
        self.opening: Future[OpenServing] = Future()
        self.released: list[int] = []

    def make(self, handle: int) -> OpenServing:
        serving = SimpleNamespace(allowed=lambda filters: None)
        return OpenServing(cast(Any, serving), cast(Any, self.device), cast(Any, self.device), handle)

    @property
    def newest(self) -> OpenServing | None:
        return self.held[max(self.held)] if self.held else None

    def get(self, handle: int) -> OpenServing | None:
        return self.held.get(handle)

    def find(self, name: Name) -> OpenServing | None:
        return self.held[1] if name == OPEN else None

    def open(self, name: Name) -> Future[OpenServing]:
        self.asked.append(name)
        return self.opening

    def put(self, opened: OpenServing) -> None:
        self.held[opened.handle] = opened

    def release(self, handle: int) -> None:
        self.released.append(handle)


class Running:
    """An engine server in a thread, which workers can connect to."""

    def __init__(self, folder: Path, supervisor: SupervisorPipe | None = None) -> None:
        self.device = FakeDevice()
        self.servings = FakeServings(self.device)
        self.reported: list[tuple[int, int]] = []
        self.path = folder / "engine.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.server = EngineServer(
            self.listener, LIMITS, lambda size, tokens, seconds, waiting: self.reported.append((size, waiting))
        )
        self._thread = threading.Thread(
            target=self.server.serve, args=[cast(OpenServings, self.servings), supervisor], daemon=True
        )
        self._thread.start()

    def is_over(self) -> bool:
        self._thread.join(WAIT_SECONDS)
        return not self._thread.is_alive()

    @contextlib.contextmanager
    def worker(self, *, accepted: bool = True) -> Iterator[Worker]:
        """Connects; waits until the engine has `accepted`, since a connection is otherwise read one batch later."""
        before = set(self.server.connections)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(WAIT_SECONDS)
            connection.connect(str(self.path))
            wait_until(lambda: self.server.connections - before or not accepted)
            yield Worker(connection)


class Worker:
    """The worker's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = FrameReader()
        self._bodies: list[memoryview] = []

    def send_request(self, number: int, *first: int, handle: int = 1, k: int = 2, **facts: object) -> None:
        ids = np.array([token for token in first for _ in range(2)], np.int32)
        request = Request(number, handle, k, ids=ids, lengths=np.full(len(first), 2, np.int32), **cast(Any, facts))
        self.connection.sendall(frames.write_request(request))

    def send_control(self, kind: Kind, number: int, facts: object = None) -> None:
        self.connection.sendall(frames.write_control(kind, number, facts))

    def body(self) -> memoryview:
        while not self._bodies:
            data = self.connection.recv(65536)
            assert data, "the engine closed the connection"
            self._bodies += self._reader.feed(data)
        return self._bodies.pop(0)

    def answer(self) -> Response:
        return frames.read_response(self.body())

    def is_closed(self) -> bool:
        try:
            return self.connection.recv(1) == b""
        except ConnectionResetError:
            return True
