"""Shards: embeddings that a build has finished, in files that survive a crash, in a folder or any fsspec file system.

A shard is a .npy file of (content hash, vector) rows whose name is the SHA-256 of its bytes, so the names in a place
list the work done, and half a shard is detected. Several processes may write into one place.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from indexer.errors import NotReached
from indexer.store.arrays import Array
from indexer.store.documents import HASH_BYTES
from indexer.store.files import sync
from models.encoder.spec import sha256_of

SUFFIX = ".npy"
UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Vectors (rows, dim) float16 and the content hash (rows, 16) uint8 of each."""

    hashes: Array
    vectors: Array


@dataclass(frozen=True, slots=True)
class Shard:
    """Embeddings in a file, mapped on each access: a process cannot keep the shards of a large corpus open."""

    path: Path

    @property
    def hashes(self) -> Array:
        return _map(self.path)["hash"]

    @property
    def vectors(self) -> Array:
        return _map(self.path)["vector"]


@dataclass(frozen=True)
class Shards:
    """Shards in a folder. Pickled to the process that writes one, on whatever machine that is."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def write(self, embeddings: Embeddings) -> str:
        """Returns the shard's name when it is safe; readers see all of it or nothing."""
        return self.keep(_shard_bytes(embeddings))

    def keep(self, content: bytes) -> str:
        """Writes a shard's bytes under their name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = _shard_name(content)
        unfinished = self.folder / f"{UNFINISHED}{secrets.token_hex(8)}"
        unfinished.write_bytes(content)
        sync(unfinished)
        os.replace(unfinished, self.folder / name)
        sync(self.folder)
        return name

    def bring(self, name: str) -> bool:
        """Returns whether this machine has the shard now; fetches it from elsewhere if it can."""
        return (self.folder / name).is_file()

    def read(self, dim: int) -> Iterator[Shard]:
        """Yields sound shards of this dimension; removes damaged ones. For the sole builder while no process writes."""
        for path in self.folder.glob(f"{UNFINISHED}*"):
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if sha256_of(path) != path.stem:
                path.unlink()
            elif _map(path).dtype == _row_type(dim):
                yield Shard(path)

    def clear(self) -> None:
        """Removes all of it, as far as it can."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class RemoteShards(Shards):
    """Shards under an fsspec address; they are fetched into `folder` of this machine, checked, and read there."""

    url: str

    def __str__(self) -> str:
        return self.url

    def write(self, embeddings: Embeddings) -> str:
        content = _shard_bytes(embeddings)
        name = _shard_name(content)
        with self._reached() as (files, folder):
            files.makedirs(folder, exist_ok=True)
            files.pipe_file(f"{folder}/{name}", content)
        return name

    def bring(self, name: str) -> bool:
        if super().bring(name):
            return True
        with self._reached() as (files, folder):
            path = f"{folder}/{name}"
            try:
                content = files.cat_file(path)
            except FileNotFoundError:
                return False
            if _shard_name(content) != name:
                files.rm_file(path)
                return False
        self.keep(content)
        return True

    def read(self, dim: int) -> Iterator[Shard]:
        with self._reached() as (files, folder):
            files.invalidate_cache()  # other processes wrote there
            try:
                paths = files.ls(folder, detail=False)
            except FileNotFoundError:
                paths = []
        for path in sorted(path for path in paths if path.endswith(SUFFIX)):
            self.bring(path.rpartition("/")[2])
        yield from super().read(dim)

    def clear(self) -> None:
        with suppress(NotReached), self._reached() as (files, folder):
            files.invalidate_cache()
            if files.exists(folder):
                files.rm(folder, recursive=True)
        super().clear()

    @contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """Yields the file system of the address and the path in it."""
        try:
            from fsspec.core import url_to_fs  # optional: only an address needs it

            yield url_to_fs(self.url)
        except OSError as error:
            raise NotReached(self.url, error.strerror or error) from error
        except Exception as error:  # a store's own exceptions have no common class; a missing library is among them
            raise NotReached(self.url, error) from error


def open_shards(place: str | None, name: str, own: Path) -> Shards:
    """Opens an encoder's shards: in `own`, or under `name` in `place`, a mount or an address (fetched to `own`)."""
    if place is None:
        return Shards(own)
    scheme, separator, path = place.partition("://")
    if not separator or scheme in ("file", "local"):
        return Shards(Path(path or place).absolute() / name)
    return RemoteShards(own, f"{place.rstrip('/')}/{name}")


def _shard_bytes(embeddings: Embeddings) -> bytes:
    rows = np.empty(len(embeddings.hashes), dtype=_row_type(embeddings.vectors.shape[1]))
    rows["hash"], rows["vector"] = embeddings.hashes, embeddings.vectors
    file = BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()


def _shard_name(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}{SUFFIX}"


def _map(path: Path) -> Array:
    rows: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return rows


def _row_type(dim: int) -> np.dtype[np.void]:
    return np.dtype([("hash", "|u1", (HASH_BYTES,)), ("vector", "<f2", (dim,))])
