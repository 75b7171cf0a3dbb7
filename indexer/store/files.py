"""Inter-process locks, durable writes, and an on-disk dictionary.

Locks are by flock on a file, which the system releases however a process ends, and an NFS client passes on to the
server. A mount that keeps locks local, or has none, is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

from indexer.errors import BadDisk, Busy, NotWritten

MOUNTS = Path("/proc/self/mounts")
NETWORK_DISKS = ("nfs", "nfs4")
# Options by which an NFS client keeps locks to itself.
LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock"}
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Pages that SQLite may hold in memory; the rest is on disk.
CACHE_KIB = 16_384
# Keys cached in front of SQLite: fields of few values are looked up once.
REMEMBERED = 10_000


def sync(path: Path) -> None:
    """Returns when the file or folder is on the disk, not only in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, prepare: Callable[[Path], None] = lambda new: None) -> None:
    """Replaces a file atomically; returns when the new content is on the disk.

    `prepare` gets the new file before it takes the place of the old one.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    prepare(temporary)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


@contextmanager
def sole_builder(path: Path) -> Iterator[None]:
    """Holds a lock file, created if missing and never removed; raises Busy if another process holds it."""
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
    """Waits for a lock file, created if missing and never removed. For short work."""
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
    """Says why locks on the folder's disk do not reach other machines, by its mount options; None if they do."""
    try:
        return mounted_with_local_locks(folder, MOUNTS.read_text(encoding="utf-8", errors="replace"))
    except OSError:  # no Linux
        return None


def mounted_with_local_locks(folder: Path, mounts: str) -> str | None:
    """As `local_locks`, by the text of /proc/mounts."""
    kind, options, nearest = "", "", -1
    for fields in (line.split(" ") for line in mounts.splitlines()):
        if len(fields) < 4:
            continue
        point = Path(fields[1].replace("\\040", " "))
        # Of two mounts on one point the later hides the earlier.
        if folder.is_relative_to(point) and len(point.parts) >= nearest:
            nearest, kind, options = len(point.parts), fields[2], fields[3]
    local = LOCAL_LOCKS & set(options.split(","))
    return f"mounted as {kind} with {', '.join(sorted(local))}" if kind in NETWORK_DISKS and local else None


class DiskDict:
    """Maps texts to numbers in a SQLite scratch file that close() removes: a million ids cost no memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._remembered: dict[str, int] = {}
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
        except sqlite3.OperationalError as error:
            raise NotWritten(path, error) from error
        for statement in (
            f"PRAGMA cache_size = -{CACHE_KIB}",
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            "CREATE TABLE entries (key BLOB PRIMARY KEY, value INTEGER) WITHOUT ROWID",
            "BEGIN",
        ):
            self._execute(statement)

    def add(self, key: str, value: int) -> int | None:
        """Adds a key with its number; returns None if the key is new, else the number that it has."""
        encoded = key.encode()
        if self._execute("INSERT OR IGNORE INTO entries VALUES (?, ?)", (encoded, value)).rowcount:
            return None
        (found,) = self._execute("SELECT value FROM entries WHERE key = ?", (encoded,)).fetchone()
        return int(found)

    def setdefault(self, key: str, value: int) -> int:
        """Returns the number of `key`, which is `value` if the key is new."""
        found = self._remembered.get(key)
        if found is None:
            found = self.add(key, value)
            found = value if found is None else found
            if len(self._remembered) < REMEMBERED:
                self._remembered[key] = found
        return found

    def sorted_items(self) -> Iterator[tuple[bytes, int]]:
        """Yields every key in UTF-8 and its number, ascending by bytes, which is the order of the code points."""
        yield from self._execute("SELECT key, value FROM entries ORDER BY key")

    def close(self) -> None:
        """Removes the file; may be called twice."""
        self._database.close()
        self._path.unlink(missing_ok=True)

    def _execute(self, statement: str, values: tuple[bytes, int] | tuple[bytes] | tuple[()] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise NotWritten(self._path, error) from error
