"""Shards on an object store, or wherever fsspec reaches; and which of the two kinds of place an address means.

What lies there is fetched into a folder of this machine, checked, and read from that. fsspec is imported when an
address asks for it: serving does without. A PUT of an object store is atomic; where a store's writes are not, half a
shard is found out by its name, which is the SHA-256 of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexer.store.errors import NotReached
from indexer.store.shards import SUFFIX, Embeddings, LocalShards, Shard, Shards, shard_bytes, shard_name


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
