"""Caches embeddings and rankings of an evaluation in one folder.

Embeddings are kept by the hash of the text as the encoder read it, instruction included, in a folder for each encoder.
Every process appends to a file of its own: a process that is killed loses at most the record it was writing.
"""

from __future__ import annotations

import os
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from models.lexical import Ranking

Vectors = NDArray[np.float32]

HASH_BYTES = 16
SUFFIX = ".vectors"
_HASH, _VECTOR, _ROWS, _SCORES, _ENDS = "hash", "vector", "rows", "scores", "ends"


def text_hash(*texts: str) -> bytes:
    """Names a sequence of texts; another split of the same characters has another hash."""
    digest = blake2b(digest_size=HASH_BYTES)
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.digest()


class VectorCache:
    """The vectors of one encoder: memory-mapped to read, append-only to write. For one thread."""

    def __init__(self, folder: Path, dim: int) -> None:
        self._record = np.dtype([(_HASH, f"V{HASH_BYTES}"), (_VECTOR, "<f4", (dim,))])
        self._known: dict[bytes, Vectors] = {}
        self._own = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            # A record that its writer did not finish is not counted.
            self._map(path, 0, path.stat().st_size // self._record.itemsize)

    def find(self, texts: Sequence[str], vectors: Vectors) -> list[int]:
        """Fills the rows of `vectors` (texts, dim) that are known; returns the others."""
        missing = []
        for row, text in enumerate(texts):
            if (known := self._known.get(text_hash(text))) is None:
                missing.append(row)
            else:
                vectors[row] = known
        return missing

    def unknown(self, texts: Iterable[str]) -> list[str]:
        return [text for text in texts if text_hash(text) not in self._known]

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Keeps vectors (texts, dim) for later calls and later processes."""
        self._own.parent.mkdir(parents=True, exist_ok=True)
        records = np.empty(len(texts), dtype=self._record)
        records[_HASH] = np.frombuffer(b"".join(map(text_hash, texts)), dtype=self._record[_HASH])
        records[_VECTOR] = vectors
        with self._own.open("ab") as file:
            start = file.tell()
            file.write(records.tobytes())
        self._map(self._own, start, len(texts))

    def _map(self, path: Path, start: int, count: int) -> None:
        """Makes `count` records known that begin at this byte of a file."""
        if count:
            records = np.memmap(path, self._record, "r", start, (count,)).view(np.ndarray)
            self._known |= zip((each.tobytes() for each in records[_HASH]), records[_VECTOR], strict=True)


def load_rankings(path: Path) -> list[Ranking] | None:
    """Rankings that `save_rankings` wrote; None if there is no such file, or it cannot be read."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            ends = arrays[_ENDS][:-1]
            return list(zip(np.split(arrays[_ROWS], ends), np.split(arrays[_SCORES], ends), strict=True))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def save_rankings(path: Path, rankings: Sequence[Ranking]) -> None:
    arrays = {
        _ENDS: np.cumsum([len(rows) for rows, _ in rankings]),
        _ROWS: np.concatenate([rows for rows, _ in rankings]),
        _SCORES: np.concatenate([scores for _, scores in rankings]),
    }
    with written_whole(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file that other processes find complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("xb") as file:
            yield file
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
