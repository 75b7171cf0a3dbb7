"""A folder of versions and one pointer to the version that is served.

`root/versions/<version>/` are snapshots, `root/CURRENT` names the served one, `root/PUBLISHED` lists every version
that was ever served, so that a rollback cannot land on a build that nobody released. Every change is one atomic
rename: a reader sees the old state or the new one.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from indexer.store.errors import BadCollection, BadSnapshot
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from indexer.store.writer import sync

BUILDING = ".building-"


class Collection:
    """The versions of one corpus. Holds no state but the path: every answer is read from the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._versions = root / "versions"
        self._pointer = root / "CURRENT"
        self._published = root / "PUBLISHED"

    def current(self) -> str | None:
        """The version that is served, None where nothing was published yet."""
        try:
            return self._pointer.read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise BadCollection(f"{self._pointer} is not readable ({error}); remove it, then publish") from error

    def versions(self) -> list[str]:
        """Every finished version, oldest first: the names begin with the time."""
        if not self._versions.is_dir():
            return []
        return sorted(path.name for path in self._versions.iterdir() if path.is_dir() and path.name[0] != ".")

    def folder(self, version: str) -> Path:
        """Where a version is; refuses one that the collection does not have."""
        if version not in self.versions():
            known = ", ".join(self.versions()[-5:]) or "none; care index build makes one"
            raise BadCollection(f"{self.root} has no version {version}; it has {known}")
        return self._versions / version

    @contextmanager
    def building(self, version: str) -> Iterator[Path]:
        """A hidden folder to write a snapshot in: it becomes the version on success and goes away on failure."""
        hidden = self._versions / f"{BUILDING}{version}"
        hidden.mkdir(parents=True)
        try:
            yield hidden
            hidden.rename(self._versions / version)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
        sync(self._versions)

    def publish(self, version: str, *, force: bool = False) -> None:
        """Makes a version the served one, after opening it with every checksum.

        Refuses a change of space or dimension, which would break a service that runs with the present query
        encoder, unless `force`.
        """
        snapshot = Snapshot.open(self.folder(version))
        if snapshot.version != version:
            raise BadSnapshot(f"{snapshot.folder} says it is version {snapshot.version}; restore the folder's name")
        if not force:
            self._require_same_space(snapshot.manifest)
        with self._published.open("a", encoding="utf-8") as file:
            file.write(f"{version}\n")
            file.flush()
            os.fsync(file.fileno())
        self._point_to(version)

    def rollback(self, version: str | None = None) -> str:
        """Serves the version published before the current one, or the one named; returns its name."""
        target = version or self._previous()
        self.publish(target, force=True)
        return target

    def _previous(self) -> str:
        current = self.current()
        if current is None:
            raise BadCollection(f"{self.root} has no published version; care index publish makes one")
        try:
            published = set(self._published.read_text(encoding="utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            reason = f"{self._published}, which lists what was published, is not readable ({error})"
            raise BadCollection(f"{reason}; name the version to go back to") from error
        older = [version for version in self.versions() if version in published and version < current]
        if not older:
            raise BadCollection(f"{self.root} has no version older than {current} that was published; name one")
        return older[-1]

    def _require_same_space(self, new: Manifest) -> None:
        current = self.current()
        if current is None or current == new.version or current not in self.versions():
            return
        try:
            old = Manifest.read(self.folder(current))
        except BadSnapshot:  # a damaged snapshot must not keep a sound one from taking its place
            return
        if (old.space, old.dim) != (new.space, new.dim):
            raise BadCollection(
                f"{new.version} is in space {new.space} ({new.dim} dimensions), {current} in {old.space} ({old.dim}): "
                "the running query encoder would not fit; publish with --force if it changes too"
            )

    def _point_to(self, version: str) -> None:
        temporary = self._pointer.with_name(f".CURRENT-{secrets.token_hex(4)}")
        temporary.write_text(f"{version}\n", encoding="utf-8")
        sync(temporary)
        os.replace(temporary, self._pointer)
        sync(self.root)


def new_version(now: datetime | None = None) -> str:
    """A name that sorts by time, to the millisecond, and is its own even within one."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%dT%H%M%S}{moment.microsecond // 1000:03d}Z-{secrets.token_hex(4)}"
