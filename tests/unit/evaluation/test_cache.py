import contextlib
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from models.evaluation.cache import VectorCache, load_rankings, save_rankings, text_hash, written_whole
from models.lexical import Ranking

DIM = 3
RECORD_BYTES = 16 + 4 * DIM


def vectors_of(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count * DIM, dtype=np.float32).reshape(count, DIM)


def found(cache: VectorCache, texts: list[str]) -> tuple[np.ndarray, list[int]]:
    vectors = np.full((len(texts), DIM), np.nan, dtype=np.float32)
    return vectors, cache.find(texts, vectors)


def test_added_vectors_are_found_at_once_and_by_the_next_process(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path, DIM)
    cache.add(["甲", "乙"], vectors_of(2))
    cache.add(["丙"], vectors_of(1, 50))
    for reader in (cache, VectorCache(tmp_path, DIM)):
        vectors, missing = found(reader, ["丙", "没有", "甲", "丙"])
        assert missing == [1]
        assert vectors[[0, 2, 3]].tolist() == [[50, 51, 52], [0, 1, 2], [50, 51, 52]]


def test_an_empty_cache_finds_nothing_and_writes_nothing(tmp_path: Path) -> None:
    cache = VectorCache(tmp_path / "none", DIM)
    assert found(cache, ["甲"])[1] == [0]
    assert cache.unknown(["甲"]) == ["甲"]
    assert found(cache, [])[1] == []
    assert not (tmp_path / "none").exists()


def test_files_of_several_runs_are_read_together(tmp_path: Path) -> None:
    for text in ("甲", "乙", "丙"):
        cache = VectorCache(tmp_path, DIM)
        cache.add([text], vectors_of(1, ord(text)))
    assert len(list(tmp_path.iterdir())) == 3
    vectors, missing = found(VectorCache(tmp_path, DIM), ["丙", "甲", "乙"])
    assert missing == []
    assert vectors[:, 0].tolist() == [float(ord(text)) for text in ("丙", "甲", "乙")]


@pytest.mark.parametrize("lost", [1, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 5])
def test_a_truncated_record_is_ignored(tmp_path: Path, lost: int) -> None:
    cache = VectorCache(tmp_path, DIM)
    cache.add(["甲", "乙", "丙"], vectors_of(3))
    (path,) = tmp_path.iterdir()
    os.truncate(path, 3 * RECORD_BYTES - lost)
    vectors, missing = found(VectorCache(tmp_path, DIM), ["甲", "乙", "丙"])
    assert missing == ([2] if lost <= RECORD_BYTES else [1, 2])
    assert vectors[0].tolist() == [0, 1, 2]
    again = VectorCache(tmp_path, DIM)
    again.add(["丙"], vectors_of(1, 90))
    assert found(VectorCache(tmp_path, DIM), ["丙"])[0].tolist() == [[90, 91, 92]]


def _write(folder: Path, name: str) -> None:
    cache = VectorCache(folder, DIM)
    for number in range(50):
        cache.add([f"{name}{number}", f"both{number}"], np.full((2, DIM), number, dtype=np.float32))


def test_two_processes_may_write_at_the_same_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(tmp_path, name)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0]
    texts = [f"{name}{number}" for name in ("a", "b", "both") for number in range(50)]
    vectors, missing = found(VectorCache(tmp_path, DIM), texts)
    assert missing == []
    assert vectors[:, 0].tolist() == [*range(50)] * 3


def test_the_hash_depends_on_texts_and_their_boundaries() -> None:
    assert text_hash("ab") != text_hash("a", "b")
    assert text_hash("a", "bc") != text_hash("ab", "c")
    assert text_hash("a") == text_hash("a")


def test_cached_rankings_are_read_as_written(tmp_path: Path) -> None:
    rankings: list[Ranking] = [
        (np.array([4, 2], dtype=np.int64), np.array([0.5, 0.25], dtype=np.float32)),
        (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)),
        (np.array([7], dtype=np.int64), np.array([3], dtype=np.float32)),
    ]
    path = tmp_path / "some" / "name.npz"
    assert load_rankings(path) is None
    save_rankings(path, rankings)
    again = load_rankings(path)
    assert again is not None
    assert [rows.tolist() for rows, _ in again] == [[4, 2], [], [7]]
    assert [scores.tolist() for _, scores in again] == [[0.5, 0.25], [], [3]]
    path.write_bytes(path.read_bytes()[:100])
    assert load_rankings(path) is None


def test_an_unfinished_file_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with contextlib.suppress(RuntimeError), written_whole(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with written_whole(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]
