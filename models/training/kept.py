"""Vectors on disk, found by their texts: runs that share a folder read each text once.

A file holds what one encoder read at one time; none is changed or written twice. So a run's vectors may lie in several
files, beside those of texts that it does not have.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.encoder.packed.joined import side_by_side
from models.encoder.spec import Side
from models.training.texts import Rows, Texts

Half = NDArray[np.float16]
KEYS, VECTORS = ".keys", ".f16"


@dataclass(frozen=True)
class _Column:
    """What one encoder has read: files, and the row of each text if they lie one after the other; -1: not read yet."""

    files: list[Half]
    places: Rows
    dim: int

    def read(self, rows: Rows | slice) -> Half:
        places = self.places[rows]
        found = np.empty((len(places), self.dim), dtype=np.float16)
        first = 0
        for file in self.files:
            here = (places >= first) & (places < first + len(file))
            found[here] = file[places[here] - first]
            first += len(file)
        return found


class Kept:
    """Vectors (texts, dim) by one encoder, or by two side by side; rows are read when they are asked for."""

    def __init__(self, *columns: _Column, share: float = 0.0) -> None:
        self._columns, self._share = columns, share
        self.shape = len(columns[0].places), sum(column.dim for column in columns)
        self.nbytes = 2 * self.shape[0] * self.shape[1]

    def beside(self, other: Kept, share: float) -> Kept:
        """Returns both side by side, the other one with this share."""
        return Kept(*self._columns, *other._columns, share=share)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Rows | slice) -> Half:
        parts = [column.read(rows) for column in self._columns]
        if len(parts) == 1:
            return parts[0]
        return side_by_side([part.astype(np.float32) for part in parts], self._share).astype(np.float16)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401 - numpy's own
        return self[:].astype(dtype or np.float16, copy=False)

    @property
    def missing(self) -> Rows:
        """The texts that no file holds."""
        return np.flatnonzero(np.any([column.places < 0 for column in self._columns], axis=0))


class Shelf:
    """The files of one encoder and one side in a folder, which other runs may share."""

    def __init__(self, folder: Path, function: str, side: Side, dim: int) -> None:
        name = hashlib.blake2b(f"{function} {side}".encode(), digest_size=8)
        self._folder, self._name, self._dim = folder, name.hexdigest(), dim

    def find(self, texts: Texts) -> Kept:
        """Returns the vectors of texts, as far as there are any."""
        files, places, before = list[Half](), np.full(len(texts), -1, dtype=np.int64), 0
        for path in sorted(self._folder.glob(f"{self._name}-*{KEYS}")):
            theirs, vectors = np.fromfile(path, dtype=np.uint64), path.with_suffix(VECTORS)
            # A file that lost its vectors is passed over.
            if not len(theirs) or not is_whole(vectors, len(theirs), self._dim):
                continue
            order = np.argsort(theirs)
            rows = order[np.searchsorted(theirs, texts.keys, sorter=order) % len(theirs)]
            here = (theirs[rows] == texts.keys) & (places < 0)
            if here.any():
                files.append(np.memmap(vectors, dtype=np.float16, mode="r", shape=(len(theirs), self._dim)))
                places[here] = before + rows[here]
                before += len(theirs)
        return Kept(_Column(files, places, self._dim))

    def file_for(self, texts: Texts) -> Path:
        """Returns where vectors of texts are to be written."""
        return self._folder / f"{self._name}-{texts.digest}{VECTORS}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from reading texts with the same encoder meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{self._name}.lock").open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"another run reads for {self._folder}: waiting for it", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def is_whole(path: Path, texts: int, dim: int) -> bool:
    return path.is_file() and path.stat().st_size == 2 * texts * dim


def allocate(path: Path, size: int) -> bool:
    """Reserves a file of this size, unless it is there: a full disk shows here, not in the middle of a mapped write."""
    if path.is_file() and path.stat().st_size == size:
        return False
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    return True
