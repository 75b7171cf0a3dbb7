"""Workers' connections to the engine: they may close at any time, and may exceed the limit of open files."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.engine.jobs import Status
from tests.support.waiting import wait_until
from tests.unit.service.running_engine import WAIT_SECONDS, Running, Worker


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path)
    yield running
    running.server.end()
    assert running.is_over()
    running.listener.close()


@pytest.mark.parametrize("unread", [False, True], ids=["at its end", "with an answer unread"])
def test_a_worker_may_leave_at_any_time(engine: Running, unread: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that ends before it has read everything is not an error: its socket is reset, not closed."""
    with caplog.at_level(logging.WARNING):
        with engine.worker() as worker:
            worker.send_request(1, 1)
            worker.answer()
            assert len(engine.server.connections) == 1
            if unread:
                worker.send_request(2, 1)
                wait_until(lambda: len(engine.reported) == 2)
        wait_until(lambda: not engine.server.connections)
    assert caplog.records == []


def test_a_worker_that_sends_invalid_frames_is_disconnected_with_a_warning(
    engine: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), engine.worker() as worker:
        worker.connection.sendall(b"\xff" * 64)
        assert worker.is_closed()
        wait_until(lambda: not engine.server.connections)
    assert "a worker's connection is closed: a frame of" in caplog.text


@pytest.fixture
def few_files() -> Iterator[None]:
    """A low limit of open files, for as long as the test runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 32, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_at_the_file_limit_a_worker_waits_and_the_engine_goes_on(
    engine: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with engine.worker() as first, socket.socket(socket.AF_UNIX) as second, contextlib.ExitStack() as files:
        first.send_request(1, 1)
        first.answer()
        second.settimeout(WAIT_SECONDS)
        while True:
            try:
                files.callback(os.close, os.dup(second.fileno()))
            except OSError:
                break
        with caplog.at_level(logging.ERROR):
            second.connect(str(engine.path))
            wait_until(lambda: bool(caplog.records))
            for number in range(5):  # accept is not retried at once
                first.send_request(number, 1)
                assert first.answer().status is Status.DONE
        assert {record.message for record in caplog.records} == {
            "a worker cannot be accepted ([Errno 24] Too many open files); raise the limit of open files (ulimit -n)"
        }
        assert len(engine.server.connections) == 1
        files.close()
        later = Worker(second)
        later.send_request(1, 1)
        assert later.answer().status is Status.DONE
        assert len(engine.server.connections) == 2
