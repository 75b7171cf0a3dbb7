"""Figures from /proc, for processes that the test starts itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from loadtest.harness.machine import (
    command_lines,
    has_client,
    main_thread_seconds,
    private_mb,
    process_tree,
    processor_seconds,
    resident_mb,
    sampled,
)

PARENT = """
import subprocess, sys
code = "import sys; print('up', flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code, "the child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.communicate()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """Yields a process and its child, which end with the test."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        parent.communicate()


def test_a_process_tree_has_its_descendants_and_their_commands(family: tuple[int, int]) -> None:
    parent, child = family
    assert process_tree(parent) == [parent, child]
    words = command_lines(parent)
    assert words[child][-1] == "the child"
    assert "the child" not in words[parent]


def test_memory_and_time_are_of_the_whole_tree(family: tuple[int, int]) -> None:
    parent, child = family
    assert resident_mb(parent) > resident_mb(child) > 1
    assert 0 < private_mb(child) <= resident_mb(child)
    assert processor_seconds(parent) >= processor_seconds(child) >= 0


def test_cpu_time_of_this_process_and_its_main_thread_is_measured() -> None:
    before = processor_seconds(os.getpid()), main_thread_seconds(os.getpid()), time.process_time()
    other = threading.Thread(target=sum, args=[range(3_000_000)])
    other.start()
    other.join()
    whole, main, known = processor_seconds(os.getpid()), main_thread_seconds(os.getpid()), time.process_time()
    assert known - before[2] == pytest.approx(whole - before[0], abs=0.02)
    assert main - before[1] < (whole - before[0]) / 2, "the other thread did the work"


def test_samples_have_a_first_and_a_last_one(family: tuple[int, int]) -> None:
    with sampled(family[0]) as samples:
        assert len(samples) >= 1
    assert len(samples) >= 2
    assert all(sample > 1 for sample in samples)


def test_a_process_that_ended_has_no_memory_or_files() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert process_tree(gone.pid) == [gone.pid]
    assert (resident_mb(gone.pid), processor_seconds(gone.pid), command_lines(gone.pid)) == (0, 0, {})
    assert not has_client(gone.pid, 1)


def test_a_client_is_counted_at_the_process_that_accepted_it(family: tuple[int, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not has_client(os.getpid(), port)
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            assert has_client(os.getpid(), port)
            assert not has_client(family[0], port)
