"""Publishes, lists, rolls back, verifies and prunes finished versions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from indexer.checks import check_canaries
from indexer.encode import Encoder
from indexer.errors import BadCollection, BadSnapshot
from indexer.store.canaries import kept_canaries
from indexer.store.collection import Collection
from indexer.store.manifest import Manifest
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import Vectors
from models.encoder.spec import EncoderSpec, Side, Variant
from models.errors import BadEncoder


@dataclass(frozen=True, slots=True)
class Measure:
    """How the recall of an index in a database is measured: makes the queries' vectors; the least recall."""

    queries: Callable[[Snapshot], Vectors]
    floor: float


def publish(
    collection: Collection,
    version: str | None = None,
    measure: Measure | None = None,
    *,
    asking: Callable[[], Encoder] | None = None,
    force: bool = False,
) -> str:
    """Serves a version, the newest unless named; uploads it first if the collection has a database. Returns its name.

    `measure` measures its recall there. `asking` opens the encoder for the canaries, which must pass unless `force`.
    """
    after = version or collection.newest()
    if collection.database is not None and measure is not None:
        from indexer.upload import upload  # needs the database's client, which is optional

        snapshot = Snapshot.open(collection.folder(after))
        with closing(collection.database.connect()) as connected:
            upload(connected, snapshot, partial(measure.queries, snapshot), measure.floor)
    if not force:
        _ask_canaries(collection, after, asking)
    collection.publish(after, force=force)
    return after


def admit(collection: Collection, encoder: Path, version: str | None = None) -> str:
    """Lets a query encoder search a version (the served one unless named); returns its name."""
    spec = EncoderSpec.load(encoder)
    if Side.QUERY not in spec.sides:
        raise BadEncoder(f"{encoder} reads documents only; name the folder of the query encoder")
    chosen = choose(collection, version)
    collection.admit(chosen, spec)
    return chosen


def rollback(
    collection: Collection,
    version: str | None = None,
    *,
    asking: Callable[[], Encoder] | None = None,
    force: bool = False,
) -> str:
    """Serves the version published before the current one, or the one named; returns its name.

    Unless forced, the query encoder must be admitted to it and the canaries must pass.
    """
    target = version or (collection.previous() if collection.current() else None)
    if target is not None and asking is not None and not force:
        encoder = asking()
        Manifest.read(collection.folder(target)).require_encoder(encoder.spec)
        _ask_canaries(collection, target, lambda: encoder)
    return collection.rollback(version)


def _ask_canaries(collection: Collection, version: str, asking: Callable[[], Encoder] | None) -> None:
    if asking is not None and (canaries := kept_canaries(collection.root)):
        check_canaries(collection, version, asking(), canaries)


def list_versions(collection: Collection) -> dict[str, Manifest | BadSnapshot]:
    """Returns every version, oldest first: its manifest, or why that is unreadable."""
    found: dict[str, Manifest | BadSnapshot] = {}
    for version in collection.versions():
        try:
            found[version] = Manifest.read(collection.folder(version))
        except BadSnapshot as error:
            found[version] = error
    return found


def verify(collection: Collection, version: str | None = None) -> Manifest:
    """Opens a version (the served one unless named) with every checksum; raises BadSnapshot with the reason."""
    return Snapshot.open(collection.folder(choose(collection, version))).manifest


def prune(collection: Collection, keep: int | None, keep_days: float | None, *, unfinished: bool = False) -> list[str]:
    """Removes and returns versions that are neither among the `keep` newest nor younger than `keep_days`.

    The served version and the one before it always stay. `unfinished` also removes the shards of unfinished builds.
    Raises Busy while a build runs.
    """
    if keep is None and keep_days is None:
        raise BadCollection("nothing says what to keep: give --keep, --keep-days or both")
    with collection.sole_builder():
        if unfinished:
            shutil.rmtree(collection.shards_root, ignore_errors=True)
        return collection.prune(keep or 0, keep_days or 0.0)


def is_encoded_by(collection: Collection, encoder: Path) -> bool:
    """Returns whether the served version was made by this encoder as it is now; False if nothing sound is served."""
    served = collection.served_manifest()
    if served is None or not isinstance(served.encoder.variant, Variant):
        return False
    return served.encoder.fingerprint == EncoderSpec.load(encoder).fingerprint(served.encoder.variant.filename)


def choose(collection: Collection, version: str | None) -> str:
    """Returns the version named, or the served one, or the newest."""
    return version or collection.current() or collection.newest()
