"""Shards at a remote address: they behave as in a folder, and a damaged object is made again."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from indexer.build import BuildOptions, build
from indexer.encode import Encoder, EncodeShards, encode_here
from indexer.errors import NotReached
from indexer.store.collection import Collection
from indexer.store.shards import Embeddings, RemoteShards, Shards, open_shards
from indexer.versions import verify
from tests.support.fast_encoder import FailingEncoder, FastEncoder
from tests.unit.indexer.support import DIM, unit_vectors, write_lines

URL = "memory://care/shards"
OPTIONS = BuildOptions(shard_texts=3, shards=URL)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    """Clears fsspec's memory, which all tests of a process share."""
    yield
    fsspec.filesystem("memory").store.clear()


def some(seed: int = 0) -> Embeddings:
    hashes = np.random.default_rng(seed).integers(0, 256, (10, 16), dtype=np.uint8)
    return Embeddings(hashes, unit_vectors(10, seed=seed))


def shards_at(url: str, own: Path) -> RemoteShards:
    shards = open_shards(url, "fingerprint", own)
    assert isinstance(shards, RemoteShards)
    return shards


def objects() -> list[str]:
    return sorted(fsspec.filesystem("memory").find("/care"))


def test_shards_written_by_one_machine_are_read_by_another(tmp_path: Path) -> None:
    given = some()
    name = shards_at(URL, tmp_path / "one").write(given)
    assert objects() == [f"/care/shards/fingerprint/{name}"]
    assert not (tmp_path / "one").exists()
    other = shards_at(f"{URL}/", tmp_path / "other")
    (shard,) = other.read(DIM)
    np.testing.assert_array_equal(shard.hashes, given.hashes)
    np.testing.assert_array_equal(shard.vectors, given.vectors)
    assert [path.name for path in (tmp_path / "other").iterdir()] == [name]


def test_a_shard_has_one_name_everywhere(tmp_path: Path) -> None:
    assert shards_at(URL, tmp_path).write(some()) == Shards(tmp_path).write(some())


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_damaged_object_is_removed(tmp_path: Path, size: int) -> None:
    shards = shards_at(URL, tmp_path)
    kept, damaged = shards.write(some(1)), shards.write(some())
    files = fsspec.filesystem("memory")
    path = f"/care/shards/fingerprint/{damaged}"
    files.pipe_file(path, files.cat_file(path)[:size])
    assert len(list(shards.read(DIM))) == 1
    assert objects() == [f"/care/shards/fingerprint/{kept}"]
    assert not shards.bring(damaged)


def test_an_empty_address_has_no_shards(tmp_path: Path) -> None:
    shards = shards_at(URL, tmp_path)
    assert list(shards.read(DIM)) == []
    assert not shards.bring("other.npy")
    shards.clear()


def test_clear_removes_local_and_remote_shards(tmp_path: Path) -> None:
    shards = shards_at(URL, tmp_path / "own")
    shards.write(some())
    assert len(list(shards.read(DIM))) == 1
    shards.clear()
    assert objects() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_local_folder_is_used_without_copying(tmp_path: Path, scheme: str) -> None:
    shards = open_shards(f"{scheme}{tmp_path}/mounted", "fingerprint", tmp_path / "own")
    assert shards == Shards(tmp_path / "mounted" / "fingerprint")
    assert open_shards(None, "fingerprint", tmp_path / "own") == Shards(tmp_path / "own")


def test_an_unusable_address_gives_a_one_line_error(tmp_path: Path) -> None:
    shards = shards_at("nothing://care", tmp_path)
    with pytest.raises(NotReached, match=r"nothing://care/fingerprint cannot be used \(Protocol not known: nothing\)"):
        list(shards.read(DIM))
    shards.clear()


def test_a_build_resumes_from_remote_shards(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "c.jsonl", *({"_id": str(n), "text": f"第{n}种药的用法"} for n in range(20)))
    plain, collection = Collection(tmp_path / "plain"), Collection(tmp_path / "collection")
    whole = build([corpus], FastEncoder(swayed=True), plain, replace(OPTIONS, shards=None))
    with pytest.raises(KeyboardInterrupt):
        build([corpus], FailingEncoder(4), collection, OPTIONS)
    first, *others = objects()
    assert len(others) == 3
    files = fsspec.filesystem("memory")
    content = files.cat_file(first)
    files.pipe_file(first, content[:-1] + bytes([content[-1] ^ 1]))
    summary = build([corpus], FastEncoder(swayed=True), collection, OPTIONS)
    assert summary.encoded == 20 - 3 * 3
    assert verify(collection, summary.version).content == verify(plain, whole.version).content
    assert objects() == []
    assert not collection.shards("fast").exists()


def test_collections_at_one_address_do_not_remove_each_others_shards(tmp_path: Path) -> None:
    """One build dies while another collection with the same encoder builds at the same address."""
    options = BuildOptions(shard_texts=3, shards=str(tmp_path / "shared"))
    rows = {name: [{"_id": f"{name}{number}", "text": f"{name} {number}"} for number in range(9)] for name in "ab"}
    corpora = [write_lines(tmp_path / f"{name}.jsonl", *own) for name, own in rows.items()]
    first, second = (Collection(tmp_path / f"collection-{name}") for name in "ab")
    with pytest.raises(RuntimeError, match="dies"):
        build([corpora[0]], FastEncoder(), first, replace(options, encode=_dies_after(2)))
    build([corpora[1]], FastEncoder(), second, options)
    assert build([corpora[0]], FastEncoder(), first, options).encoded == 3
    copied = shutil.copytree(first.root, tmp_path / "copy")
    with Collection(copied).sole_builder(), first.sole_builder():
        assert Collection(copied).identity() != first.identity()
    assert not list((tmp_path / "shared").rglob("*.npy"))


def _dies_after(shards: int) -> EncodeShards:
    def encode(texts: Iterable[list[str]], encoder: Encoder, place: Shards) -> Iterator[int]:
        for number, finished in enumerate(encode_here(texts, encoder, place), start=1):
            yield finished
            if number == shards:
                raise RuntimeError("dies")

    return encode
