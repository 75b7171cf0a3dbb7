"""A dictionary from texts to numbers that lives on disk, so that a million ids or values cost no memory.

It is a scratch file of a build, by SQLite: nothing is ever committed, and the file goes away with close().
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from indexer.store.errors import NotWritten

# Pages that SQLite may hold in memory; the rest is on disk.
CACHE_KIB = 16_384
# The keys met first are remembered beside SQLite: fields of few values, the usual ones, never ask it twice.
REMEMBERED = 10_000


class DiskDict:
    """Keeps the number that a text was first given."""

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
        """Gives the key its number; None if that was new, else the number that it has."""
        encoded = key.encode()
        if self._execute("INSERT OR IGNORE INTO entries VALUES (?, ?)", (encoded, value)).rowcount:
            return None
        (found,) = self._execute("SELECT value FROM entries WHERE key = ?", (encoded,)).fetchone()
        return int(found)

    def setdefault(self, key: str, value: int) -> int:
        """The number of `key`, which is `value` if the key is new."""
        found = self._remembered.get(key)
        if found is None:
            found = self.add(key, value)
            found = value if found is None else found
            if len(self._remembered) < REMEMBERED:
                self._remembered[key] = found
        return found

    def sorted_items(self) -> Iterator[tuple[bytes, int]]:
        """Every key in UTF-8 and its number, ascending by bytes, which is the order of the code points."""
        yield from self._execute("SELECT key, value FROM entries ORDER BY key")

    def close(self) -> None:
        """Gives the file back; called twice, it does nothing."""
        self._database.close()
        self._path.unlink(missing_ok=True)

    def _execute(self, statement: str, values: tuple[bytes, int] | tuple[bytes] | tuple[()] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise NotWritten(self._path, error) from error
