"""Shards of an unfinished build: each one present is complete, and incomplete ones are ignored."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from indexer.encode import Reuse
from indexer.store.shards import Embeddings, Shards
from tests.unit.indexer.support import DIM, unit_vectors


def some(rows: int = 10, seed: int = 0) -> Embeddings:
    hashes = np.random.default_rng(seed).integers(0, 256, (rows, 16), dtype=np.uint8)
    return Embeddings(hashes, unit_vectors(rows, seed=seed))


def test_a_shard_is_read_as_written(tmp_path: Path) -> None:
    given, shards = some(), Shards(tmp_path / "new")
    name = shards.write(given)
    (shard,) = shards.read(DIM)
    np.testing.assert_array_equal(shard.hashes, given.hashes)
    np.testing.assert_array_equal(shard.vectors, given.vectors)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]
    assert shards.bring(name)
    assert not shards.bring("other.npy")


def test_writing_the_same_shard_twice_gives_one_file(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    assert shards.write(some()) == shards.write(some())
    assert shards.write(some(seed=1)) != shards.write(some())
    assert len(list(shards.read(DIM))) == 2


def test_shards_can_be_written_concurrently(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda number: shards.write(some(seed=number % 20)), range(200)))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(set(names))
    assert len(list(shards.read(DIM))) == 20


@pytest.mark.parametrize("place", [0, 60, 200, -1])
def test_an_altered_shard_is_removed(tmp_path: Path, place: int) -> None:
    shards = Shards(tmp_path)
    kept, path = tmp_path / shards.write(some(seed=1)), tmp_path / shards.write(some())
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert len(list(shards.read(DIM))) == 1
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("size", [0, 100, 500])
def test_a_truncated_shard_is_removed(tmp_path: Path, size: int) -> None:
    shards = Shards(tmp_path)
    path = tmp_path / shards.write(some())
    path.write_bytes(path.read_bytes()[:size])
    assert list(shards.read(DIM)) == []
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_file_is_not_a_shard(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    name = shards.write(some())
    (tmp_path / ".unfinished-1").write_bytes(b"half")
    assert len(list(shards.read(DIM))) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_shards_of_another_dimension_are_ignored(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shards.write(some())
    assert list(shards.read(DIM + 1)) == []
    assert len(list(shards.read(DIM))) == 1


def test_a_missing_folder_has_no_shards(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "nowhere")
    assert list(shards.read(DIM)) == []
    shards.clear()


def test_clear_removes_all_shards(tmp_path: Path) -> None:
    shards = Shards(tmp_path / "new")
    shards.write(some())
    shards.clear()
    assert list(tmp_path.iterdir()) == []


def test_there_may_be_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    shards, made = Shards(tmp_path), [some(seed=number) for number in range(80)]
    for each in made:
        shards.write(each)
    reuse = Reuse(np.concatenate([each.hashes for each in made]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 30, hard))
    try:
        assert reuse.show(list(shards.read(DIM))) == 0
        vectors = np.concatenate(list(reuse.vectors()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    np.testing.assert_array_equal(vectors, np.concatenate([each.vectors for each in made]))
