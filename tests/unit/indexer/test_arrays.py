"""Streamed arrays: they are numpy's own files, and invalid files are refused."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import BadSnapshot, TooLarge
from indexer.store import documents as passages
from indexer.store.arrays import ArrayWriter, Blob, BlobWriter, load_array


@given(
    blocks=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=8), width=st.sampled_from([0, 3])
)
def test_writing_in_blocks_gives_the_file_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]], width: int
) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    shape = (width,) if width else ()
    arrays = [np.array(block, dtype="<i4").repeat(width or 1).reshape(-1, *shape) for block in blocks]
    writer = ArrayWriter(folder / "ours.npy", "<i4", shape)
    for array in arrays:
        writer.append(array)
    whole = np.concatenate([np.empty((0, *shape), dtype="<i4"), *arrays])
    assert writer.close() == len(whole)
    np.save(folder / "numpys.npy", whole)
    assert (folder / "ours.npy").read_bytes() == (folder / "numpys.npy").read_bytes()


def test_arrays_are_little_endian_and_never_pickled(tmp_path: Path) -> None:
    writer = ArrayWriter(tmp_path / "a.npy", "<i4")
    writer.append(np.asarray([1, 2], dtype=">i4"))
    writer.close()
    assert load_array(tmp_path / "a.npy", "<i4", (2,)).tolist() == [1, 2]
    with (tmp_path / "o.npy").open("wb") as objects:  # a file that claims to hold Python objects
        np.lib.format.write_array_header_1_0(objects, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    with pytest.raises(BadSnapshot, match="not a readable array"):
        load_array(tmp_path / "o.npy", "<i4", (1,))
    with pytest.raises(BadSnapshot, match=r"holds <i4 \(2,\), expected <i8"):
        load_array(tmp_path / "a.npy", "<i8", (None,))


def test_an_unfinished_file_has_no_rows(tmp_path: Path) -> None:
    with ArrayWriter(tmp_path / "a.npy", "<i4") as writer:
        writer.append([1, 2])
    with pytest.raises(BadSnapshot, match=r"a\.npy"):
        load_array(tmp_path / "a.npy", "<i4", (2,))


@given(runs=st.lists(st.binary(max_size=20), max_size=10))
def test_runs_of_bytes_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, runs: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("blob")
    writer = BlobWriter(folder, "runs", ExitStack())
    writer.append(*runs)
    for run in runs:
        writer.append(run)
    writer.close()
    blob = Blob.open(folder, "runs", 2 * len(runs))
    assert [blob[position] for position in range(len(blob))] == runs + runs


def test_a_number_that_overflows_its_type_is_refused(tmp_path: Path) -> None:
    with ArrayWriter(tmp_path / "rows.npy", "<i4") as writer:
        writer.append(np.array([2**31 - 1]))
        for rows in (np.array([2**31]), [2**31]):
            with pytest.raises(TooLarge, match=r"rows\.npy holds numbers up to 2147483647, not 2147483648: divide"):
                writer.append(rows)
        assert writer.close() == 1


def test_more_passages_than_row_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passages, "MOST_PASSAGES", 3)
    hashes = np.zeros((2, passages.HASH_BYTES), np.uint8)
    with ExitStack() as files:
        writer = passages.PassagesWriter(tmp_path, files)
        writer.add(0, [(0, 1), (1, 2)], hashes)
        with pytest.raises(TooLarge, match="several collections"):
            writer.add(1, [(0, 1), (1, 2)], hashes)
