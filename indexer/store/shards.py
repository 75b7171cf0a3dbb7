"""What a build has encoded so far, in files that survive its death: a shard holds vectors and their content hashes.

A shard is a .npy file of (content hash, vector) rows whose name is the SHA-256 of its bytes, so the names in the folder
are the ledger of the work done, and each entry proves itself. It appears by one rename, when it is on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexer.store.arrays import Array, ArrayWriter
from indexer.store.passages import HASH_BYTES
from indexer.store.writer import sync
from models.spec import sha256_of

SUFFIX = ".npy"
UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """Vectors (rows, dim) float16 and the content hash (rows, 16) uint8 of each."""

    hashes: Array
    vectors: Array


def write_shard(folder: Path, embeddings: Embeddings) -> Path:
    """Returns when the shard is on the disk; whoever looks into the folder sees all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.empty(len(embeddings.hashes), dtype=_row_type(embeddings.vectors.shape[1]))
    rows["hash"], rows["vector"] = embeddings.hashes, embeddings.vectors
    unfinished = folder / UNFINISHED
    with ArrayWriter(unfinished, rows.dtype) as writer:
        writer.append(rows)
        writer.close()
    sync(unfinished)
    path = folder / f"{sha256_of(unfinished)}{SUFFIX}"
    os.replace(unfinished, path)
    sync(folder)
    return path


def read_shards(folder: Path, dim: int) -> Iterator[Embeddings]:
    """Every sound shard of this dimension, mapped. One that is damaged is removed: its texts count as never encoded."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if sha256_of(path) != path.stem:
            path.unlink()
            continue
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        if rows.dtype == _row_type(dim):
            yield Embeddings(rows["hash"], rows["vector"])


def _row_type(dim: int) -> np.dtype[np.void]:
    return np.dtype([("hash", "|u1", (HASH_BYTES,)), ("vector", "<f2", (dim,))])
