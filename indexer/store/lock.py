"""Locks between processes, by flock on a file: the system releases them when a process ends, however it ends.

A file, not a folder: an NFS client passes locks on files to the server and keeps locks on folders to itself. A disk
whose mount keeps locks on files local too, or has none, is refused: two machines would write at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

from indexer.store.errors import BadDisk, Busy

MOUNTS = Path("/proc/self/mounts")
NETWORK_DISKS = ("nfs", "nfs4")
# Options by which an NFS client keeps locks to itself.
LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock"}
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@contextmanager
def sole_builder(path: Path) -> Iterator[None]:
    """Holds the lock file, which is made at need and then stays; raises Busy if another process holds it."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        try:
            _lock(file, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
def in_turn(path: Path) -> Iterator[None]:
    """Waits until no other process holds this lock file, which is made at need and then stays. For short work."""
    with path.open("ab") as file:  # open for writing: NFS grants an exclusive lock to nothing else
        _lock(file, path, fcntl.LOCK_EX)
        yield


def _lock(file: IO[str] | IO[bytes], path: Path, operation: int) -> None:
    if reason := local_locks(path.parent.resolve()):
        raise BadDisk(path.parent, reason)
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise BadDisk(path.parent, error.strerror) from error
        raise


@lru_cache
def local_locks(folder: Path) -> str | None:
    """Why locks on the folder's disk do not reach other machines, by the options of its mount; None if they do."""
    try:
        return mounted_with_local_locks(folder, MOUNTS.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # no Linux
        return None


def mounted_with_local_locks(folder: Path, mounts: str) -> str | None:
    """The same, by the text of /proc/mounts."""
    kind, options = "", ""
    nearest = -1
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        point = Path(fields[1].replace("\\040", " "))
        # Of two mounts on one point the later hides the earlier.
        if folder.is_relative_to(point) and len(point.parts) >= nearest:
            nearest, kind, options = len(point.parts), fields[2], fields[3]
    local = LOCAL_LOCKS & set(options.split(","))
    return f"mounted as {kind} with {', '.join(sorted(local))}" if kind in NETWORK_DISKS and local else None
