"""What is done to finished versions: publish, list, roll back, verify, prune. Each returns a value to print."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from indexer.checks import check_canaries
from indexer.encode import Encoder
from indexer.errors import BadCollection, BadSnapshot
from indexer.store.canaries import kept_canaries
from indexer.store.collection import Collection, Database
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from models.errors import BadEncoder
from models.onnx_encoder import Vectors
from models.spec import EncoderSpec, Side, Variant


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version as a list shows it. Where the manifest is unreadable, `problem` says why and the rest is None."""

    version: str
    current: bool
    created: datetime | None
    documents: int | None
    passages: int | None
    size_bytes: int | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """How the recall of an index in a database is measured: by which queries' vectors, and the least of it."""

    queries: Callable[[Snapshot], Vectors]
    floor: float


@dataclass(frozen=True, slots=True)
class Move:
    """The pointer went from one version (None: there was none) to another."""

    before: str | None
    after: str


def publish(
    collection: Collection,
    version: str | None = None,
    measure: Measure | None = None,
    *,
    asking: Callable[[], Encoder] | None = None,
    force: bool = False,
) -> Move:
    """Serves a version, the newest unless named; puts it into the collection's database first, where there is one.

    `measure` is how its recall there is measured. `asking` opens the encoder that asks the collection's canaries,
    which must pass unless `force`.
    """
    before = collection.current()
    after = version or newest(collection)
    if collection.database is not None and measure is not None:
        _put_into(collection.database, Snapshot.open(collection.folder(after)), measure)
    if not force:
        _ask_canaries(collection, after, asking)
    collection.publish(after, force=force)
    return Move(before, after)


def _put_into(database: Database, snapshot: Snapshot, measure: Measure) -> None:
    from indexer.upload import upload  # needs the database's client, which nobody else does

    with closing(database.connect()) as connected:
        upload(connected, snapshot, partial(measure.queries, snapshot), measure.floor)


def admit(collection: Collection, encoder: Path, version: str | None = None) -> str:
    """Lets a query encoder search a version (the served one unless named); returns its name."""
    spec = EncoderSpec.load(encoder)
    if Side.QUERY not in spec.sides:
        raise BadEncoder(f"{encoder} reads documents only; name the folder of the query encoder")
    chosen = choose(collection, version)
    collection.admit(chosen, spec)
    return chosen


def _ask_canaries(collection: Collection, version: str, asking: Callable[[], Encoder] | None) -> None:
    if asking is not None and (canaries := kept_canaries(collection.root)):
        check_canaries(collection, version, asking(), canaries)


def rollback(
    collection: Collection,
    version: str | None = None,
    *,
    asking: Callable[[], Encoder] | None = None,
    force: bool = False,
) -> Move:
    """Serves the version published before the current one, or the one named; checks canaries as `publish` does."""
    before = collection.current()
    target = version or (collection.previous() if before else None)
    if target is not None and not force:
        _ask_canaries(collection, target, asking)
    return Move(before, collection.rollback(version))


def list_versions(collection: Collection) -> list[VersionInfo]:
    """Every version, oldest first."""
    current = collection.current()
    return [_info(collection, version, version == current) for version in collection.versions()]


def verify(collection: Collection, version: str | None = None) -> Manifest:
    """Opens a version (the served one unless named) with every checksum; raises BadSnapshot with the reason."""
    return Snapshot.open(collection.folder(choose(collection, version))).manifest


def prune(collection: Collection, keep: int | None, keep_days: float | None, *, unfinished: bool = False) -> list[str]:
    """Removes versions that are neither among the `keep` newest nor younger than `keep_days`; returns their names.

    The served version and the one before it stay in any case. With `unfinished`, what builds have encoded that never
    came to an end goes too. Raises Busy while a build may be reading any of it.
    """
    if keep is None and keep_days is None:
        raise BadCollection("nothing says what to keep: give --keep, --keep-days or both")
    with collection.sole_builder():
        if unfinished:
            shutil.rmtree(collection.shards_root, ignore_errors=True)
        return collection.prune(keep or 0, keep_days or 0.0)


def readable(collection: Collection) -> Iterator[Manifest]:
    """The manifests of all versions that have one that can be read, oldest first."""
    for version in collection.versions():
        with suppress(BadSnapshot):
            yield Manifest.read(collection.folder(version))


def is_encoded_by(collection: Collection, encoder: Path) -> bool:
    """Whether the served version was made by this encoder as it is now; False too where nothing sound is served."""
    served = collection.served_manifest()
    if served is None or not isinstance(served.encoder.variant, Variant):
        return False
    return served.encoder.fingerprint == EncoderSpec.load(encoder).fingerprint(served.encoder.variant.filename)


def choose(collection: Collection, version: str | None) -> str:
    """The version named, or the served one, or the newest."""
    return version or collection.current() or newest(collection)


def newest(collection: Collection) -> str:
    """The newest version, published or not."""
    versions = collection.versions()
    if not versions:
        raise BadCollection(f"{collection.root} has no version; care index build makes one")
    return versions[-1]


def _info(collection: Collection, version: str, current: bool) -> VersionInfo:
    try:
        manifest = Manifest.read(collection.folder(version))
    except BadSnapshot as error:
        return VersionInfo(version, current, None, None, None, None, str(error))
    counts = manifest.counts
    return VersionInfo(version, current, manifest.created, counts.documents, counts.passages, manifest.size_bytes)
