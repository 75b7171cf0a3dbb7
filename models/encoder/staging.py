"""Makes a folder under a temporary name beside its target, so that one rename puts it in place."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "lock"


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Yields a folder beside `target`, on its file system, so that a rename puts in place what is made there.

    It is removed at the end. Folders that killed runs left for this target are removed first: weights are large.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}-"
    for other in [path for path in target.parent.iterdir() if path.name.startswith(prefix)]:
        if _was_left(other):
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work, Path(work, LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(work)


def _was_left(folder: Path) -> bool:
    """Returns whether no process works in the folder any more."""
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another user's folder, or one in use
        return False
    return True
