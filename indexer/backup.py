"""Write a collection into one file: every version, the log of posted documents, the pointer, and the API keys.

Searches and posts continue, and everything acknowledged before the command began is in the file; a re-index that
starts meanwhile ends with 75. The file is a plain tar that others than its owner cannot read. care restore reads it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from indexer.command import COLLECTION
from indexer.errors import BadBackup, BadSnapshot
from indexer.store.canaries import CANARIES_FILE
from indexer.store.collection import Collection
from indexer.store.files import in_turn, sync
from indexer.store.fresh_log import LOCK_FILE
from indexer.store.manifest import Manifest
from models.package import care_version

FORMAT = 2
# The last entry holds the checksums of everything but the versions, whose manifests have theirs.
FACTS, SUMS, KEYS, INSIDE = "backup.json", "checksums.json", "keys", "collection"
POINTER = "CURRENT"
# Beside versions and log. The history comes before the pointer: so read, it is never ahead of it.
SMALL_FILES = (CANARIES_FILE, "page.json", "PUBLISHED", POINTER)
KEYS_VARIABLE = "CARE_KEYS_FILE"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="file to write; an older one stays until the new one is whole")
    add_places(parser)


def add_places(parser: ArgumentParser) -> None:
    """Adds the options that backup and restore share."""
    folder, keys = os.environ.get("CARE_COLLECTION") or COLLECTION, os.environ.get(KEYS_VARIABLE) or None
    text = "collection folder (CARE_COLLECTION; %(default)s)"
    parser.add_argument("--collection", type=Path, default=folder, help=text)
    parser.add_argument("--keys", type=Path, default=keys, help=f"file of the API keys ({KEYS_VARIABLE}; none)")


def run(arguments: Namespace) -> None:
    keys = arguments.keys
    versions, damaged = write_backup(Collection(arguments.collection), arguments.file, keys)
    size = arguments.file.stat().st_size / 1e6
    print(f"backed up {len(versions)} versions{' and the keys' if keys else ''} to {arguments.file} ({size:.1f} MB)")
    for reason in damaged:
        print(f"left out a damaged version: {reason}", file=sys.stderr)


def write_backup(collection: Collection, file: Path, keys: Path | None = None) -> tuple[list[str], list[str]]:
    """Writes the file; returns the versions in it, and what is wrong with those left out.

    Raises Busy while a build runs, BadSnapshot if the served version is damaged.
    """
    if not collection.versions():
        raise BadBackup(f"{collection.root} has no version: there is nothing to back up; check --collection")
    if keys is not None and not keys.is_file():
        raise BadBackup(f"{keys}: there is no such file of keys; leave out --keys and {KEYS_VARIABLE}, or name it")
    if keys is not None and not _holds_keys(keys):
        raise BadBackup(f"{keys} is not a file of keys: no service would start with it; care keys list checks one")
    if file.exists() and not file.is_file():
        raise BadBackup(f"{file} is not a file: a backup is written beside its place and moved there; name a file")
    file = file.resolve()  # a link stays: it may lead to another disk
    partial = file.with_name(f".{file.name}.new")
    # The partial file, too, belongs to one backup: another would cut it short, and remove it when it ends.
    with collection.sole_builder():
        if (served := collection.current()) is not None:
            collection.folder(served)  # a restore would publish what is missing
        versions, damaged = _check_versions(collection)
        partial.unlink(missing_ok=True)  # of a backup that was killed
        try:
            # Only the owner may read the documents and keys in it.
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
                with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as tar:
                    _add_all(tar, collection, versions, keys)
                written.flush()
                os.fsync(written.fileno())
            os.replace(partial, file)
        finally:
            partial.unlink(missing_ok=True)
    sync(file.parent)
    return versions, damaged


def _holds_keys(path: Path) -> bool:
    """Whether a file has the form of one that care keys wrote."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return held.keys() <= {"keys"} and all("hash" in key for key in held.get("keys", []))
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False


def _check_versions(collection: Collection) -> tuple[list[str], list[str]]:
    """Verifies every checksum; returns the versions that a restore will take, and what is wrong with the others."""
    sound: list[str] = []
    damaged: list[str] = []
    for version in collection.versions():
        folder = collection.folder(version)
        try:
            Manifest.read(folder).verify_files(folder)
            sound.append(version)
        except BadSnapshot as error:
            if version == collection.current():
                raise
            damaged.append(str(error))
    if not sound:
        raise BadBackup(f"{collection.root} has no sound version ({damaged[0]}): there is nothing to back up")
    return sound, damaged


def _add_all(tar: tarfile.TarFile, collection: Collection, versions: list[str], keys: Path | None) -> None:
    facts = {"format": FORMAT, "created": datetime.now(UTC).isoformat(), "care": care_version(), "versions": versions}
    _add_json(tar, FACTS, facts)
    for version in versions:
        for path, name in _files(collection.folder(version), f"{INSIDE}/versions/{version}"):
            tar.add(path, name)
    sums = _add_log(tar, collection)
    for name in SMALL_FILES:
        if (path := collection.root / name).is_file():
            sums |= _add(tar, path, f"{INSIDE}/{name}")
    if keys is not None:
        sums |= _add(tar, keys, KEYS)
    _add_json(tar, SUMS, sums)


def _add_json(tar: tarfile.TarFile, name: str, value: Mapping[str, object]) -> None:
    data = json.dumps(value).encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(data), int(time.time())
    tar.addfile(entry, io.BytesIO(data))


def _add_log(tar: tarfile.TarFile, collection: Collection) -> dict[str, str]:
    """Copies the log under its lock: no frame is half-written."""
    folder, sums = collection.fresh_log.folder, dict[str, str]()
    if folder.is_dir():
        with in_turn(folder / LOCK_FILE):
            for path, name in _files(folder, f"{INSIDE}/fresh"):
                if path.name != LOCK_FILE:
                    sums |= _add(tar, path, name)
    return sums


def _add(tar: tarfile.TarFile, path: Path, name: str) -> dict[str, str]:
    """Adds a file; returns its checksum by name."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        tar.addfile(tar.gettarinfo(arcname=name, fileobj=file), file)
    return {name: checksum}


def _files(folder: Path, name: str) -> list[tuple[Path, str]]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(path, f"{name}/{path.relative_to(folder).as_posix()}") for path in found]
