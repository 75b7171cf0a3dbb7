"""Locks between processes, by flock: the system lets go of them when a process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from indexer.store.errors import Busy


@contextmanager
def sole_builder(path: Path) -> Iterator[None]:
    """Holds the lock file, which is made at need and then stays; raises Busy if another process holds it."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise Busy(f"process {holder} is at work on {path.parent}; wait until it has ended") from None
        try:
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()} on {platform.node()}\n".encode())
        except OSError as error:
            error.filename = str(path)  # a write that fails does not say where
            raise
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Waits until no other process is inside for the same folder. For short work: nobody is told who holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
