"""The engine's sockets, with real ones at the other end."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.engine.hub import Connection, Hub


class Engine:
    """A hub and what it was told."""

    def __init__(self, address: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(address))
        self.listener.listen()
        self.left: list[Connection] = []
        self.hub = Hub(self.listener, on_body=lambda *_: None, on_close=self.left.append)

    def connect(self) -> tuple[socket.socket, Connection]:
        worker = socket.socket(socket.AF_UNIX)
        worker.connect(self.listener.getsockname())
        self.hub.poll(wait=True)
        (connection,) = self.hub.connections
        return worker, connection


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "engine")
    yield made
    made.hub.close()
    made.listener.close()


@pytest.mark.parametrize("unread", [b"", b"an answer"], ids=["at its end", "with an answer unread"])
def test_a_worker_may_leave_at_any_time(engine: Engine, unread: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """One that ends before it has read all is no fault of anybody's: its socket is reset, not closed."""
    worker, connection = engine.connect()
    engine.hub.send(connection, unread)
    worker.close()
    with caplog.at_level(logging.WARNING):
        engine.hub.poll(wait=True)
    assert engine.left == [connection]
    assert not engine.hub.connections
    assert caplog.records == []


def test_a_worker_that_sends_nonsense_is_cut_off_with_a_warning(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker, connection = engine.connect()
    worker.sendall(b"\xff" * 64)
    with caplog.at_level(logging.WARNING):
        engine.hub.poll(wait=True)
    worker.close()
    assert engine.left == [connection]
    assert "a worker's connection is closed: a frame of" in caplog.text
