"""The engine's sockets, with real ones at the other end."""

import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.engine.remote.server import ACCEPT_SECONDS, Connection, Connections


class Engine:
    """A hub and what it was told."""

    def __init__(self, address: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(address))
        self.listener.listen()
        self.left: list[Connection] = []
        self.hub = Connections(self.listener, on_body=lambda *_: None, on_close=self.left.append)

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


@pytest.fixture
def few_files() -> Iterator[None]:
    """A low limit of open files, for as long as the test runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 32, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_the_file_limit_keeps_a_worker_waiting_and_ends_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("service.engine.remote.server.monotonic", lambda: now)
    first, connection = engine.connect()
    with first, socket.socket(socket.AF_UNIX) as second, contextlib.ExitStack() as files:
        while True:
            try:
                files.callback(os.close, os.dup(second.fileno()))
            except OSError:
                break
        second.connect(engine.listener.getsockname())
        with caplog.at_level(logging.ERROR):
            for _ in range(5):  # it does not try again at once
                engine.hub.poll(wait=False)
        assert [record.message for record in caplog.records] == [
            "a worker cannot be accepted ([Errno 24] Too many open files); raise the limit of open files (ulimit -n)"
        ]
        engine.hub.send(connection, b"an answer")
        assert first.recv(64) == b"an answer"
        files.close()
        now = ACCEPT_SECONDS
        engine.hub.poll(wait=True)
        assert len(engine.hub.connections) == 2
