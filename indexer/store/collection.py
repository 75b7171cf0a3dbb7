"""A folder of versions and one pointer to the version that is served.

`root/versions/<version>/` are snapshots, `root/CURRENT` names the served one, `root/PUBLISHED` lists what was
served, in order, so that a rollback cannot land on a build that nobody released. Every change is one atomic
rename: a reader sees the old state or the new one. `root/shards/` keeps what an unfinished build has encoded,
`root/fresh/` what the service was given, and what was deleted, since the oldest version was built. Where vectors are
searched in a database, its alias moves before the pointer, and a version leaves it before the disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from pathlib import Path

from indexer.store.database import Database
from indexer.store.errors import BadCollection, BadSnapshot
from indexer.store.fresh_log import FreshLog
from indexer.store.lock import in_turn, sole_builder
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from indexer.store.writer import sync
from models.spec import EncoderSpec

BUILDING = ".building-"
REMOVING = ".removing-"
VERSION_TIME = "%Y%m%dT%H%M%S"


class Collection:
    """The versions of one corpus. Holds no state but where it is: every answer is read from the disk."""

    def __init__(self, root: Path, database: Database | None = None) -> None:
        """`database` is where the vectors of published versions are searched, if not by whoever serves them."""
        self.root = root
        self.database = database
        self._versions = root / "versions"
        self._pointer = root / "CURRENT"
        self._published = root / "PUBLISHED"
        self.rejects = root / "rejects"
        self.shards_root = root / "shards"
        self._publishing = root / "LOCK.publish"
        self.fresh_log = FreshLog(root / "fresh")

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

    def shards(self, fingerprint: str) -> Path:
        """Where an unfinished build of this encoder keeps what it has encoded."""
        return self.shards_root / fingerprint

    def identity(self) -> str:
        """A name that no other collection has, for what is kept outside its folder. For the only builder.

        A copy in another folder has another name.
        """
        path = self.root / "ID"
        if not path.exists():
            self._replace(path, [secrets.token_hex(8)])
        return blake2b(path.read_bytes() + bytes(self.root.resolve()), digest_size=8).hexdigest()

    @contextmanager
    def sole_builder(self) -> Iterator[None]:
        """Keeps other builds out, and clears away what one that was killed left half-written. Raises Busy."""
        with sole_builder(self.root / "LOCK"):
            self._versions.mkdir(exist_ok=True)
            for path in self._versions.iterdir():
                if path.name.startswith((BUILDING, REMOVING)):
                    shutil.rmtree(path)
            yield

    @contextmanager
    def building(self, version: str) -> Iterator[Path]:
        """A hidden folder to write a snapshot in: it becomes the version on success and goes away on failure."""
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
        """Makes a version the served one, after opening it with every checksum.

        Refuses a change of space or dimension, which would break a service that runs with the present query
        encoder, unless `force`. Where there is a database, the version must be in it.
        """
        folder = self.folder(version)
        with in_turn(self._publishing):  # else a version could be pruned between its opening and its publication
            snapshot = Snapshot.open(folder)
            if snapshot.version != version:
                raise BadSnapshot(f"{snapshot.folder} says it is version {snapshot.version}; restore the folder's name")
            if not force:
                made = snapshot.manifest
                self.require_same_space(version, made.space, made.dim, made.query_encoders)
            if self.database is not None:
                # First: whoever is killed here leaves a pointer to a version that is still there, and its services
                # search that version's own collection.
                with closing(self.database.connect()) as connected:
                    connected.point_to(snapshot)
            # What PUBLISHED names was served: a version is added once CURRENT names it. If a kill came between the
            # two, the one that CURRENT names is added now.
            self._record(self.current())
            self._replace(self._pointer, [version])
            self._record(version)

    def require_same_space(self, name: str, space: str, dim: int, query_encoders: Sequence[str]) -> None:
        """Refuses what the query encoder of the running services does not fit; `name` says what that is.

        `query_encoders` are the identities of those that may search it.
        """
        current = self.current()
        if current is None or current not in self.versions():
            return
        try:
            old = Manifest.read(self.folder(current))
        except BadSnapshot:  # a damaged snapshot must not keep a sound one from taking its place
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
            sync(folder)

    def rollback(self, version: str | None = None) -> str:
        """Serves the version published before the current one, or the one named; returns its name."""
        target = self.rollback_target(version)
        self.publish(target, force=True)
        return target

    def rollback_target(self, version: str | None = None) -> str:
        """The version that a rollback would serve; raises if there is none."""
        if version is None and self.current() is None:
            raise BadCollection(f"{self.root} has no published version; care index publish makes one")
        target = version or self.previous()
        if target is None:
            raise BadCollection(f"{self.root} has no version older than {self.current()} that was published; name one")
        return target

    def previous(self) -> str | None:
        """The older version that was served when the current one was first published: where a rollback goes.

        So a version that was rolled back from, and then replaced by a newer one, is not returned to.
        """
        current = self.current()
        if current is None:
            return None
        history = self._history()
        here = self.versions()
        place = history.index(current) if current in history else len(history)
        while place > 0:
            before = history[place - 1]
            if before in here and before < current:
                return before
            place = history.index(before)
        return None

    def prune(self, keep: int, keep_days: float, now: datetime | None = None) -> list[str]:
        """Removes every version that is neither among the `keep` newest nor younger than `keep_days`.

        The current version and the one that a rollback would go to always stay. Returns what was removed.
        """
        # Names begin with the time, so they compare with a time.
        oldest = _stamp((now or datetime.now(UTC)) - timedelta(days=keep_days))
        with in_turn(self._publishing):
            versions = self.versions()
            kept = {*versions[max(0, len(versions) - keep) :], self.current(), self.previous()}
            removed = [version for version in versions if version < oldest and version not in kept]
            self._drop(removed)
            for version in removed:  # each at once, so that nobody sees half of one
                (self._versions / version).rename(self._versions / f"{REMOVING}{version}")
        for version in removed:
            shutil.rmtree(self._versions / f"{REMOVING}{version}")
            (self.rejects / f"{version}.jsonl").unlink(missing_ok=True)
        self.prune_log()
        return removed

    def discard(self, version: str) -> None:
        """Removes a version that was never published."""
        hidden = self._versions / f"{REMOVING}{version}"
        with in_turn(self._publishing):
            self.folder(version).rename(hidden)
        shutil.rmtree(hidden)
        (self.rejects / f"{version}.jsonl").unlink(missing_ok=True)

    def prune_log(self) -> None:
        """Removes from the log what every version holds, so that a rollback to any finds what it lacks."""
        versions = self.versions()
        try:
            included = [Manifest.read(self._versions / version).fresh.position for version in versions]
        except BadSnapshot:  # somebody may restore it
            return
        if included:
            self.fresh_log.prune(min(included))

    def _drop(self, versions: list[str]) -> None:
        """Out of the database, while the disk still says that they may be there."""
        if self.database is not None and versions:
            with closing(self.database.connect()) as connected:
                for version in versions:
                    connected.drop(version)

    def _history(self) -> list[str]:
        """What was served, in order."""
        try:
            return self._published.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            reason = f"{self._published}, which lists what was published, is not readable ({error})"
            raise BadCollection(f"{reason}; name the version to go back to") from error

    def _record(self, served: str | None) -> None:
        """Adds the served version to the list, unless it is the last there. A list that is unreadable begins anew."""
        try:
            history = self._history()
        except BadCollection:
            history = []
        if served is not None and history[-1:] != [served]:
            history.append(served)
        self._replace(self._published, history)

    def _replace(self, path: Path, lines: list[str]) -> None:
        """Readers see the old lines or the new ones."""
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
        sync(self.root)


def new_version(now: datetime | None = None) -> str:
    """A name that sorts by time, to the millisecond, and is its own even within one."""
    return f"{_stamp(now or datetime.now(UTC))}Z-{secrets.token_hex(4)}"


def _stamp(moment: datetime) -> str:
    return f"{moment:{VERSION_TIME}}{moment.microsecond // 1000:03d}"
