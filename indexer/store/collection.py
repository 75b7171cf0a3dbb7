"""A collection: a folder of versions, a pointer to the served one, and the log of fresh documents.

`root/versions/<version>/` are snapshots, `root/CURRENT` names the served one, `root/PUBLISHED` lists what was served,
so that a rollback never lands on an unreleased build. Every change is one atomic rename. If a database searches the
vectors, its alias moves before the pointer, and a version leaves it before the disk.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from indexer.errors import BadCollection, BadDatabase, BadSnapshot
from indexer.store.files import in_turn, replace_file, sole_builder, sync
from indexer.store.fresh_log import FreshLog
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from models.encoder.spec import EncoderSpec

if TYPE_CHECKING:
    from indexer.store.qdrant import Qdrant

BUILDING = ".building-"
REMOVING = ".removing-"
VERSION_TIME = "%Y%m%dT%H%M%S"
TIMED = 18  # characters of a name that are the time, to the millisecond
BEHIND_ALL = "~"
HERE = "faiss"
SCHEMES = {"qdrant+http": "http", "qdrant+https": "https"}
PORTS = {"http": 6333, "https": 443}


@dataclass(frozen=True, slots=True)
class Database:
    """The address of a vector database, and the alias that names the served version."""

    url: str
    alias: str
    key: str | None = None
    timeout_seconds: int = 60

    @classmethod
    def parse(cls, text: str, key: str | None = None, timeout_seconds: int = 60) -> Database | None:
        """Parses an address; None for `faiss`, which searches in the process. Raises BadDatabase for other texts."""
        if text == HERE:
            return None
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        prefix, _, alias = parts.path.rpartition("/")
        if parts.scheme not in SCHEMES or not parts.hostname or not alias or "@" in parts.netloc or parts.query:
            raise BadDatabase(f"{text!r} is neither {HERE} nor like qdrant+http://host:6333/alias")
        scheme = SCHEMES[parts.scheme]
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(f"{scheme}://{host}:{port or PORTS[scheme]}{prefix}", alias, key, timeout_seconds)

    def connect(self) -> Qdrant:
        """Makes a client, which sends nothing yet."""
        try:
            from indexer.store.qdrant import Qdrant  # its client is optional
        except ImportError as error:
            raise BadDatabase(f"{self.url} needs the qdrant extra: pip install 'care-search[qdrant]'") from error
        return Qdrant.connect(self.url, self.alias, self.key, self.timeout_seconds)


class Collection:
    """The versions of one corpus. Every answer is read from the disk."""

    def __init__(self, root: Path, database: Database | None = None) -> None:
        """`database` searches the vectors of published versions; None: the service does."""
        self.root = root
        self.database = database
        self._versions, self.rejects, self.shards_root = root / "versions", root / "rejects", root / "shards"
        self._pointer, self._published, self._publishing = root / "CURRENT", root / "PUBLISHED", root / "LOCK.publish"
        self.fresh_log = FreshLog(root / "fresh")

    def current(self) -> str | None:
        """Returns the served version; None if nothing was published yet."""
        try:
            return self._pointer.read_text(encoding="utf-8").strip() or None
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            step = "let this user read it" if isinstance(error, PermissionError) else "remove it, then publish"
            raise BadCollection(f"{self._pointer} is not readable ({error}); {step}") from error

    def served_manifest(self) -> Manifest | None:
        """Returns the manifest of the served version; None if nothing readable is served."""
        try:
            current = self.current()
            return Manifest.read(self.folder(current)) if current else None
        except (BadCollection, BadSnapshot):
            return None

    def versions(self) -> list[str]:
        """Returns every finished version, oldest first: the names begin with the time."""
        if not self._versions.is_dir():
            return []
        return sorted(path.name for path in self._versions.iterdir() if path.is_dir() and path.name[0] != ".")

    def newest(self) -> str:
        """Returns the newest version, published or not."""
        if versions := self.versions():
            return versions[-1]
        raise BadCollection(f"{self.root} has no version; care index build makes one")

    def folder(self, version: str) -> Path:
        """Returns the folder of a version; raises BadCollection if the collection does not have it."""
        if version not in self.versions():
            known = ", ".join(self.versions()[-5:]) or "none; care index build makes one"
            raise BadCollection(f"{self.root} has no version {version}; it has {known}")
        return self._versions / version

    def next_version(self, now: datetime | None = None) -> str:
        """Returns a name that sorts after all others, even if the clock was set back: rollback and prune rely on it."""
        name = new_version(now)
        if not (versions := self.versions()) or versions[-1] < name:
            return name
        newest = versions[-1]
        try:
            latest = datetime.strptime(newest[:TIMED], f"{VERSION_TIME}%f")
        except ValueError:  # a folder that no build has named
            return name
        return new_version(latest + timedelta(milliseconds=1))

    def shards(self, fingerprint: str) -> Path:
        """Returns where an unfinished build of this encoder keeps what it has encoded."""
        return self.shards_root / fingerprint

    def identity(self) -> str:
        """Returns a name that no other collection has, nor a copy in another folder. For the only builder."""
        path = self.root / "ID"
        if not path.exists():
            replace_file(path, f"{secrets.token_hex(8)}\n".encode())
        return blake2b(path.read_bytes() + bytes(self.root.resolve()), digest_size=8).hexdigest()

    @contextmanager
    def sole_builder(self) -> Iterator[None]:
        """Keeps other builds out, and removes what a killed one left half-written. Raises Busy."""
        with sole_builder(self.root / "LOCK"):
            self._versions.mkdir(exist_ok=True)
            for path in self._versions.iterdir():
                if path.name.startswith((BUILDING, REMOVING)):
                    shutil.rmtree(path)
            yield

    @contextmanager
    def building(self, version: str) -> Iterator[Path]:
        """Yields a hidden folder for a snapshot: on success it becomes the version, on failure it is removed."""
        hidden = self._versions / f"{BUILDING}{version}"
        hidden.mkdir(parents=True)
        try:
            yield hidden
            hidden.rename(self._versions / version)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self.root)  # a write that fails does not say where
            raise
        sync(self._versions)

    def publish(self, version: str, *, force: bool = False) -> None:
        """Serves a version after checking every checksum; unless `force`, the query encoder must still fit."""
        folder = self.folder(version)
        with in_turn(self._publishing):  # a version must not be pruned between its opening and its publication
            snapshot = Snapshot.open(folder)
            if snapshot.version != version:
                raise BadSnapshot(f"{snapshot.folder} says it is version {snapshot.version}; restore the folder's name")
            if not force:
                made = snapshot.manifest
                self.require_same_space(version, made.space, made.dim, made.query_encoders)
            if self.database is not None:
                # First: a kill after this leaves the pointer at a version that is still there and searchable.
                with closing(self.database.connect()) as connected:
                    connected.point_to(snapshot)
            # A version is listed in PUBLISHED once CURRENT names it; the first call repairs a kill between the two.
            self._record(self.current())
            replace_file(self._pointer, f"{version}\n".encode())
            self._record(version)

    def require_same_space(self, name: str, space: str, dim: int, query_encoders: Sequence[str]) -> None:
        """Raises BadCollection if the served query encoder cannot search `name`, which `query_encoders` may search."""
        # A damaged snapshot must not keep a sound one from taking its place.
        if (current := self.current()) is None or (old := self.served_manifest()) is None:
            return
        if (old.space, old.dim) != (space, dim):
            raise BadCollection(
                f"{name} is in space {space} ({dim} dimensions), {current} in {old.space} ({old.dim}): the running "
                "query encoder would not fit; if it changes too, build without --publish, then publish with --force"
            )
        if old.query_encoders and not set(old.query_encoders) & set(query_encoders):
            raise BadCollection(
                f"no query encoder that may search {current} may search {name}: name the one that is served with "
                "--query-encoder; if it changes too, build without --publish, then publish with --force"
            )

    def admit(self, version: str, spec: EncoderSpec) -> None:
        """Lets a further query encoder search a version; services see it when they open the version next."""
        folder = self.folder(version)
        with in_turn(self._publishing):
            Manifest.read(folder).admitting(spec).write(folder)

    def rollback(self, version: str | None = None) -> str:
        """Serves the version published before the current one, or the one named; returns its name."""
        target = self.rollback_target(version)
        self.publish(target, force=True)
        return target

    def rollback_target(self, version: str | None = None) -> str:
        """Returns the version that a rollback would serve; raises BadCollection if there is none."""
        if version is None and self.current() is None:
            raise BadCollection(f"{self.root} has no published version; care index publish makes one")
        target = self.previous() if version is None else version
        if target == "":
            raise BadCollection("the version to roll back to is empty; name one, or leave it out for the previous one")
        if target is None:
            raise BadCollection(f"{self.root} has no version older than {self.current()} that was published; name one")
        self.folder(target)
        return target

    def previous(self) -> str | None:
        """Returns the older version that was served when the current one was first published: where a rollback goes."""
        if (current := self.current()) is None:
            return None
        history, here = self._history(), self.versions()
        place = history.index(current) if current in history else len(history)
        while place > 0:
            before = history[place - 1]
            if before in here and before < current:
                return before
            place = history.index(before)  # a version that was rolled back from is passed over
        return None

    def prune(self, keep: int, keep_days: float, now: datetime | None = None) -> list[str]:
        """Removes and returns versions that are neither among the `keep` newest nor younger than `keep_days`.

        The current version and the one that a rollback would go to always stay.
        """
        # Names begin with the time, so they compare with a time. Without an age the clock spares none: it may have been
        # set back.
        oldest = _stamp((now or datetime.now(UTC)) - timedelta(days=keep_days)) if keep_days else BEHIND_ALL
        with in_turn(self._publishing):
            versions = self.versions()
            kept = {*versions[max(0, len(versions) - keep) :], self.current(), self.previous()}
            removed = [version for version in versions if version < oldest and version not in kept]
            if self.database is not None and removed:  # before the disk forgets them
                with closing(self.database.connect()) as connected:
                    for version in removed:
                        connected.drop(version)
            for version in removed:  # one rename each: readers never see half a version
                (self._versions / version).rename(self._versions / f"{REMOVING}{version}")
        for version in removed:
            self._remove(version)
        self.prune_log()
        return removed

    def discard(self, version: str) -> None:
        """Removes a version that was never published."""
        with in_turn(self._publishing):
            self.folder(version).rename(self._versions / f"{REMOVING}{version}")
        self._remove(version)

    def prune_log(self) -> None:
        """Removes from the log what every version holds, so that a rollback to any finds what it lacks."""
        try:
            included = [Manifest.read(self._versions / version).fresh.position for version in self.versions()]
        except BadSnapshot:  # it may be restored
            return
        if included:
            self.fresh_log.prune(min(included))

    def _remove(self, version: str) -> None:
        shutil.rmtree(self._versions / f"{REMOVING}{version}")
        (self.rejects / f"{version}.jsonl").unlink(missing_ok=True)

    def _history(self) -> list[str]:
        """Returns what was served, in order."""
        try:
            return self._published.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            reason = f"{self._published}, which lists what was published, is not readable ({error})"
            raise BadCollection(f"{reason}; name the version to go back to") from error

    def _record(self, served: str | None) -> None:
        """Adds the served version to the list, unless it is the last there; replaces an unreadable list."""
        try:
            history = self._history()
        except BadCollection:
            history = []
        if served is not None and history[-1:] != [served]:
            history.append(served)
        replace_file(self._published, "".join(f"{each}\n" for each in history).encode())


def new_version(now: datetime | None = None) -> str:
    """Returns a unique name that sorts by time, to the millisecond."""
    return f"{_stamp(now or datetime.now(UTC))}Z-{secrets.token_hex(4)}"


def _stamp(moment: datetime) -> str:
    return f"{moment:{VERSION_TIME}}{moment.microsecond // 1000:03d}"
