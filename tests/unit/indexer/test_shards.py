"""The ledger of an unfinished build: whatever is there is whole, and whatever is not whole is not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from indexer.store.shards import Embeddings, read_shards, write_shard
from tests.unit.indexer.support import DIM, unit_vectors


def some(rows: int = 10, seed: int = 0) -> Embeddings:
    hashes = np.random.default_rng(seed).integers(0, 256, (rows, 16), dtype=np.uint8)
    return Embeddings(hashes, unit_vectors(rows, seed=seed))


def test_a_shard_comes_back_as_it_was(tmp_path: Path) -> None:
    given = some()
    write_shard(tmp_path / "new", given)
    (shard,) = read_shards(tmp_path / "new", DIM)
    np.testing.assert_array_equal(shard.hashes, given.hashes)
    np.testing.assert_array_equal(shard.vectors, given.vectors)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".npy"]


def test_the_same_shard_twice_is_one_file(tmp_path: Path) -> None:
    assert write_shard(tmp_path, some()) == write_shard(tmp_path, some())
    assert write_shard(tmp_path, some(seed=1)) != write_shard(tmp_path, some())
    assert len(list(read_shards(tmp_path, DIM))) == 2


@pytest.mark.parametrize("place", [0, 60, 200, -1])
def test_an_altered_shard_is_removed(tmp_path: Path, place: int) -> None:
    kept, path = write_shard(tmp_path, some(seed=1)), write_shard(tmp_path, some())
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert len(list(read_shards(tmp_path, DIM))) == 1
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("size", [0, 100, 500])
def test_a_truncated_shard_is_removed(tmp_path: Path, size: int) -> None:
    path = write_shard(tmp_path, some())
    path.write_bytes(path.read_bytes()[:size])
    assert list(read_shards(tmp_path, DIM)) == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_being_written_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / ".unfinished").write_bytes(b"half")
    assert list(read_shards(tmp_path, DIM)) == []
    write_shard(tmp_path, some())
    assert len(list(tmp_path.iterdir())) == 1


def test_shards_of_another_dimension_are_left_alone(tmp_path: Path) -> None:
    write_shard(tmp_path, some())
    assert list(read_shards(tmp_path, DIM + 1)) == []
    assert len(list(read_shards(tmp_path, DIM))) == 1


def test_no_folder_no_shards(tmp_path: Path) -> None:
    assert list(read_shards(tmp_path / "nowhere", DIM)) == []
