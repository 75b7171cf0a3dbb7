"""Restore a backup (care backup) into an empty collection folder, verify every byte, and publish what was served.

The pointer is written last, so a service that watches the folder serves only what is whole. A restore that fails or is
stopped leaves the folder empty, and no keys. With a vector database, run care index publish afterwards.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tarfile
import zlib
from argparse import ArgumentParser, Namespace
from pathlib import Path, PurePosixPath

from indexer.backup import FACTS, FORMAT, INSIDE, KEYS, POINTER, SUMS, add_places
from indexer.errors import BadBackup, BadLog, BadSnapshot
from indexer.store.collection import Collection
from indexer.store.files import replace_file
from indexer.store.fresh_log import Cursor
from indexer.store.manifest import MANIFEST_FILE, Manifest
from models.encoder.spec import sha256_of

# A volume that was just made has it.
IGNORED = {"lost+found"}
# What tarfile and the modules that decompress raise; headers may hold any number and any name.
DAMAGE = (
    tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError, MemoryError, RecursionError
)  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the file that care backup wrote, plain or by gzip, bzip2 or xz")
    add_places(parser)


def run(arguments: Namespace) -> None:
    folder, keys = arguments.collection, arguments.keys
    has_keys = restore_backup(arguments.file, folder, keys)
    kept = "its keys were left out (--keys says where they go)" if keys is None else f"keys: {keys}"
    collection = Collection(folder)
    print(
        f"restored {len(collection.versions())} versions to {folder}; served: {collection.current() or 'none'}; "
        f"{kept if has_keys else 'the backup holds no keys'}"
    )


def restore_backup(file: Path, folder: Path, keys: Path | None = None) -> bool:
    """Restores into an empty folder, and keys, if the backup has some, to `keys`. Returns whether it has."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} - IGNORED:
        raise BadBackup(f"{folder} is not empty; name another --collection, or move away what is there")
    if keys is not None and keys.exists():
        raise BadBackup(f"{keys} exists; move it away, or name another --keys")
    if not file.is_file():
        raise BadBackup(f"{file} is not a file; name the one that care backup wrote")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(file) as tar:
            facts, pointer, has_keys = _extract(tar, file, folder, keys)
        _check(folder, facts["versions"], file)
    except BaseException as error:
        _clear(folder, keys)  # so that the same command may be given again
        # An OSError without a number is of the modules that decompress.
        if isinstance(error, DAMAGE) or (isinstance(error, OSError) and error.errno is None):
            reason = str(error) or type(error).__name__
            raise BadBackup(f"{file} is not a complete backup ({reason}); take another one") from error
        raise
    os.sync()
    if pointer:
        replace_file(folder / POINTER, pointer)
    return has_keys


def _extract(
    tar: tarfile.TarFile, file: Path, folder: Path, keys: Path | None
) -> tuple[dict[str, list[str]], bytes, bool]:
    """Writes the files but the pointer; returns the facts about the backup, the pointer, and whether keys are in it."""
    first = tar.next()
    if first is None or first.name != FACTS:
        raise BadBackup(f"{file} was not written by care backup")
    try:
        facts = json.loads(_read(tar, first))
        written, _ = facts["format"], facts["versions"]
    except (ValueError, KeyError, TypeError):
        raise BadBackup(f"{file} was not written by care backup: its {FACTS} cannot be read") from None
    if written != FORMAT:
        raise BadBackup(f"{file} has format {written}, this program reads {FORMAT}; use the one that wrote it")
    pointer, sums, found = b"", b"", dict[str, str]()
    while (entry := tar.next()) is not None:
        path = PurePosixPath(entry.name)
        is_known = path.is_relative_to(INSIDE) or entry.name in (KEYS, SUMS)
        if not entry.isreg() or entry.issparse() or not is_known or ".." in path.parts:
            raise BadBackup(f"{file} has an entry {entry.name!r} that care backup does not write")
        if entry.name == SUMS:
            sums = _read(tar, entry)
        elif entry.name == f"{INSIDE}/{POINTER}":
            pointer = _read(tar, entry)
            found[entry.name] = hashlib.sha256(pointer).hexdigest()
        elif entry.name == KEYS:
            held = _read(tar, entry)
            found[KEYS] = hashlib.sha256(held).hexdigest()
            if keys is not None:
                keys.parent.mkdir(parents=True, exist_ok=True)
                keys.touch(mode=0o600)
                keys.write_bytes(held)
        else:
            target = folder / path.relative_to(INSIDE)
            target.parent.mkdir(parents=True, exist_ok=True)
            tar.makefile(entry, target)
            if not path.is_relative_to(f"{INSIDE}/versions"):
                found[entry.name] = sha256_of(target)
    # Behind a damaged entry tarfile sees the end of the archive; the last one says what was before it.
    if sums != json.dumps(found).encode():
        raise BadBackup(f"{file} is not complete or was altered; take another one")
    return facts, pointer, KEYS in found


def _clear(folder: Path, keys: Path | None) -> None:
    """Removes what a restore wrote: there was nothing before it."""
    for path in folder.iterdir():
        if path.is_dir() and path.name not in IGNORED:
            shutil.rmtree(path)
        elif path.is_file():
            path.unlink()
    if keys is not None:
        keys.unlink(missing_ok=True)


def _read(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(entry)
    assert stream is not None, "a regular file"
    return stream.read()


def _check(folder: Path, versions: list[str], file: Path) -> None:
    """Compares every file of every version with its checksum, and reads the log that each of them needs.

    Removes files that no manifest names: nothing says that care backup wrote them.
    """
    collection = Collection(folder)
    if collection.versions() != versions:
        raise BadBackup(f"{file} ends before its last version; take another one")
    place, named = folder / "versions", set[str]()
    for version in versions:
        try:
            manifest = Manifest.read(collection.folder(version))
            manifest.verify_files(collection.folder(version))
            collection.fresh_log.read(Cursor(manifest.fresh.position))
            named |= {f"{version}/{name}" for name in (MANIFEST_FILE, *manifest.files)}
        except (BadSnapshot, BadLog) as error:
            raise BadBackup(f"{file} was altered: its version {version} is damaged; take another one") from error
    for path in place.rglob("*"):
        if path.is_file() and path.relative_to(place).as_posix() not in named:
            path.unlink()
