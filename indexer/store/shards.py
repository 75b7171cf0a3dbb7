"""What a build has encoded so far, in files that survive its death: a shard holds vectors and their content hashes.

A shard is a .npy file of (content hash, vector) rows whose name is the SHA-256 of its bytes, so the names in a place
are the ledger of the work done, and each entry proves itself. Several processes may write into one place.
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
from typing import Any, Protocol

import numpy as np

from indexer.errors import NotReached
from indexer.store.arrays import Array
from indexer.store.files import sync
from indexer.store.passages import HASH_BYTES
from models.spec import sha256_of

SUFFIX = ".npy"
UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Vectors (rows, dim) float16 and the content hash (rows, 16) uint8 of each."""

    hashes: Array
    vectors: Array


@dataclass(frozen=True, slots=True)
class Shard:
    """Embeddings in a file, mapped anew each time they are asked for.

    A mapping keeps its file open, and the shards of a large corpus are more than a process may have open.
    """

    path: Path

    @property
    def hashes(self) -> Array:
        return _map(self.path)["hash"]

    @property
    def vectors(self) -> Array:
        return _map(self.path)["vector"]


class Shards(Protocol):
    """A place where shards lie. It travels to the process that writes one, on whatever machine that is."""

    def write(self, embeddings: Embeddings) -> str:
        """Returns the shard's name when it is safe; whoever looks sees all of it or nothing."""

    def bring(self, name: str) -> bool:
        """Whether this machine has the shard now; it is fetched if it lies elsewhere."""

    def read(self, dim: int) -> Iterator[Shard]:
        """Every sound shard of this dimension. A damaged one is removed: its texts count as never encoded.

        Called by the only builder while nobody writes.
        """

    def clear(self) -> None:
        """Removes all of it, as far as it can: what stays is in nobody's way."""


@dataclass(frozen=True)
class LocalShards:
    """Shards in a folder. Each appears by one rename, when it is on the disk."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def write(self, embeddings: Embeddings) -> str:
        return self.keep(shard_bytes(embeddings))

    def keep(self, content: bytes) -> str:
        """Puts a shard's bytes on the disk under their name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = shard_name(content)
        unfinished = self.folder / f"{UNFINISHED}{secrets.token_hex(8)}"
        unfinished.write_bytes(content)
        sync(unfinished)
        os.replace(unfinished, self.folder / name)
        sync(self.folder)
        return name

    def bring(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def read(self, dim: int) -> Iterator[Shard]:
        for path in self.folder.glob(f"{UNFINISHED}*"):
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if sha256_of(path) != path.stem:
                path.unlink()
            elif _map(path).dtype == _row_type(dim):
                yield Shard(path)

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def shard_bytes(embeddings: Embeddings) -> bytes:
    """The .npy file of a shard."""
    rows = np.empty(len(embeddings.hashes), dtype=_row_type(embeddings.vectors.shape[1]))
    rows["hash"], rows["vector"] = embeddings.hashes, embeddings.vectors
    file = BytesIO()
    np.save(file, rows, allow_pickle=False)
    return file.getvalue()


def shard_name(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}{SUFFIX}"


def _map(path: Path) -> Array:
    rows: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return rows


def _row_type(dim: int) -> np.dtype[np.void]:
    return np.dtype([("hash", "|u1", (HASH_BYTES,)), ("vector", "<f2", (dim,))])


def open_shards(place: str | None, name: str, own: Path) -> Shards:
    """Where an encoder's shards lie: `own`, or `name` under `place`, a mounted folder or an address of fsspec's.

    What an address has is fetched into `own`.
    """
    if place is None:
        return LocalShards(own)
    scheme, separator, path = place.partition("://")
    if not separator or scheme in ("file", "local"):
        return LocalShards(Path(path or place).absolute() / name)
    return RemoteShards(f"{place.rstrip('/')}/{name}", LocalShards(own))


@dataclass(frozen=True)
class RemoteShards:
    """Shards under an address; `here` is the folder of this machine that they are fetched into."""

    url: str
    here: LocalShards

    def __str__(self) -> str:
        return self.url

    def write(self, embeddings: Embeddings) -> str:
        content = shard_bytes(embeddings)
        name = shard_name(content)
        with self._reached() as (files, folder):
            files.makedirs(folder, exist_ok=True)
            files.pipe_file(f"{folder}/{name}", content)
        return name

    def bring(self, name: str) -> bool:
        if self.here.bring(name):
            return True
        with self._reached() as (files, folder):
            path = f"{folder}/{name}"
            try:
                content = files.cat_file(path)
            except FileNotFoundError:
                return False
            if shard_name(content) != name:
                files.rm_file(path)
                return False
        self.here.keep(content)
        return True

    def read(self, dim: int) -> Iterator[Shard]:
        for name in self._names():
            self.bring(name)
        yield from self.here.read(dim)

    def clear(self) -> None:
        with suppress(NotReached), self._reached() as (files, folder):
            files.invalidate_cache()
            if files.exists(folder):
                files.rm(folder, recursive=True)
        self.here.clear()

    def _names(self) -> list[str]:
        with self._reached() as (files, folder):
            files.invalidate_cache()  # other processes wrote there
            try:
                paths = files.ls(folder, detail=False)
            except FileNotFoundError:
                return []
        return sorted(path.rpartition("/")[2] for path in paths if path.endswith(SUFFIX))

    @contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """The file system of the address and the path in it."""
        try:
            from fsspec.core import url_to_fs

            yield url_to_fs(self.url)
        except OSError as error:
            raise NotReached(self.url, error.strerror or error) from error
        except Exception as error:  # a store's own exceptions have no common class; a missing library is among them
            raise NotReached(self.url, error) from error
