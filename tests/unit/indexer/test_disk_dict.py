"""The dictionary on disk behaves like one in memory, whatever it caches."""

from __future__ import annotations

import resource
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import NotWritten
from indexer.store import files as disk_dict
from indexer.store.files import DiskDict

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)


@given(keys=st.lists(KEYS, max_size=30), remembered=st.sampled_from([0, 2, 100]))
def test_it_keeps_the_first_number_of_each_key(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], remembered: int
) -> None:
    plain: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch, closing(DiskDict(tmp_path_factory.mktemp("dict") / "d")) as entries:
        patch.setattr(disk_dict, "REMEMBERED", remembered)
        for number, key in enumerate(keys):
            assert entries.setdefault(key, number) == plain.setdefault(key, number)
            assert entries.add(key, -1) == plain[key]
        assert list(entries.sorted_items()) == sorted((key.encode(), number) for key, number in plain.items())


def test_a_new_key_is_reported_as_new(tmp_path: Path) -> None:
    with closing(DiskDict(tmp_path / "d")) as entries:
        assert entries.add("a", 5) is None
        assert entries.add("a", 6) == 5


def test_closing_removes_the_file(tmp_path: Path) -> None:
    entries = DiskDict(tmp_path / "d")
    assert (tmp_path / "d").is_file()
    entries.close()
    entries.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotWritten, match="nowhere/d could not be written"):
        DiskDict(tmp_path / "nowhere" / "d")


def test_memory_does_not_grow_with_the_keys(tmp_path: Path) -> None:
    """Keys of 1 kB, 60 MB in all: a dictionary in memory would hold them."""
    with closing(DiskDict(tmp_path / "d")) as entries:
        before = resident_bytes()
        for number in range(60_000):
            entries.add(f"{number:1000}", number)
        assert (tmp_path / "d").stat().st_size > 45e6
        assert resident_bytes() - before < 30e6


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
