"""The log of fresh documents: acknowledged changes are never lost."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from indexer.errors import BadLog, NotWritten
from indexer.store.fresh_log import Change, Cursor, Deleted, Frame, FreshLog, Posted

START = Cursor(0)


def posted(name: str, passages: int = 2) -> Posted:
    vectors = np.full((passages, 4), len(name), np.float16)
    return Posted(name, "题", "正文", {"kind": "drug", "n": 1, "tags": ["a"]}, [(0, 2)] * passages, "fp", vectors)


def names(frames: list[Frame]) -> list[list[str]]:
    return [[change.id for change in frame.changes] for frame in frames]


@pytest.fixture
def log(tmp_path: Path) -> FreshLog:
    return FreshLog(tmp_path / "fresh")


def test_changes_are_read_as_written(log: FreshLog) -> None:
    changes: list[Change] = [posted("a", 1), Deleted("b"), posted("cc", 3)]
    assert log.append(changes) == 1
    (frame,), cursor = log.read(START)
    first, gone, last = frame.changes
    assert (frame.position, gone, cursor.position) == (1, Deleted("b"), 1)
    assert isinstance(first, Posted)
    assert isinstance(last, Posted)
    assert (first.id, first.title, first.text, first.encoder) == ("a", "题", "正文", "fp")
    assert first.metadata == {"kind": "drug", "n": 1, "tags": ["a"]}
    assert list(last.spans) == [(0, 2)] * 3
    assert (first.vectors == 1).all()
    assert (last.vectors == 2).all()
    assert last.vectors.shape == (3, 4)


def test_several_writers_share_one_sequence_and_readers_follow(log: FreshLog) -> None:
    other, reader = FreshLog(log.folder), FreshLog(log.folder)
    assert reader.read(START) == ([], START)
    assert [log.append([posted("a")]), other.append([posted("b")]), log.append([posted("c")])] == [1, 2, 3]
    frames, cursor = reader.read(START)
    assert names(frames) == [["a"], ["b"], ["c"]]
    assert reader.read(cursor) == ([], cursor)
    other.append([Deleted("a")])
    assert names(reader.read(cursor)[0]) == [["a"]]
    assert names(reader.read(Cursor(2))[0]) == [["c"], ["a"]]


def test_nothing_is_appended_where_the_reader_would_not_see_it(log: FreshLog) -> None:
    log.append([posted("a")])
    log.append([posted("b")])
    _, cursor = log.read(START)
    shutil.rmtree(log.folder)
    with pytest.raises(BadLog, match=r"ends at 0, and this service has read up to 2: it was removed or replaced"):
        log.change(cursor, lambda frames, segment: [posted("c")])
    # A snapshot without a log, as after a restore, counts on from its own position.
    assert log.change(cursor, lambda frames, segment: [posted("c")], after=2) == 3


def test_a_torn_tail_is_cut_off_and_logged(log: FreshLog, caplog: pytest.LogCaptureFixture) -> None:
    log.append([posted("a")])
    (path,) = log.folder.glob("*.log")
    whole = len(path.read_bytes())
    log.append([posted("b")])
    torn = path.read_bytes()
    for length in range(whole + 1, len(torn)):
        path.write_bytes(torn[:length])
        fresh = FreshLog(log.folder)
        assert names(fresh.read(START)[0]) == [["a"]]
        with caplog.at_level(logging.WARNING):
            assert fresh.append([posted("c")]) == 2
        assert f"{length - whole} bytes that were never acknowledged" in caplog.text
        caplog.clear()
        assert names(fresh.read(START)[0]) == [["a"], ["c"]]


def test_pages_that_never_reached_the_disk_count_as_a_torn_tail(log: FreshLog) -> None:
    log.append([posted("a")])
    (path,) = log.folder.glob("*.log")
    path.write_bytes(path.read_bytes() + bytes(5000))
    assert FreshLog(log.folder).append([posted("b")]) == 2
    assert names(log.read(START)[0]) == [["a"], ["b"]]


def test_damage_before_whole_frames_is_refused_and_not_truncated(log: FreshLog) -> None:
    for name in "abc":
        log.append([posted(name)])
    (path,) = log.folder.glob("*.log")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for act in (lambda: FreshLog(log.folder).append([posted("d")]), lambda: FreshLog(log.folder).read(START)):
        with pytest.raises(BadLog, match="restore it from a backup"):
            act()
    assert path.read_bytes() == content


@pytest.mark.parametrize("kept", [0, 50, None])
def test_a_truncated_sealed_segment_is_refused(log: FreshLog, kept: int | None) -> None:
    """Damage that a crash may leave at the end of the log is not accepted in a segment that others follow."""
    log.append([posted("a")])
    log.append([posted("b")])
    log.seal()
    assert names(log.read(START)[0]) == [["a"], ["b"]]
    sealed = min(log.folder.glob("*.log"))
    content = sealed.read_bytes()
    sealed.write_bytes(content[:-1] + b"!" if kept is None else content[:kept])
    with pytest.raises(BadLog, match=r"goes on with position 3 after [01]; restore what is missing"):
        log.read(START)
    assert log.read(Cursor(2))[0] == []


def test_sealed_segments_are_removed_once_unneeded(log: FreshLog) -> None:
    assert log.seal() == 0
    log.append([posted("a")])
    assert (log.seal(), log.seal()) == (1, 1)
    frames, cursor = log.read(START)
    assert log.append([posted("b")]) == 2
    log.append([posted("c")])
    assert log.seal() == 3
    log.prune(0)
    assert names(log.read(START)[0]) == [["a"], ["b"], ["c"]]
    log.prune(2)
    assert names(log.read(cursor)[0]) == [["b"], ["c"]]
    log.prune(3)
    assert FreshLog(log.folder).append([posted("d")]) == 4
    assert names(log.read(Cursor(3))[0]) == [["d"]]
    with pytest.raises(BadLog, match="position 4 after 1"):
        log.read(cursor)
    assert names(frames) == [["a"]]


def test_positions_continue_after_those_of_a_snapshot(log: FreshLog) -> None:
    log.append([posted("a")])
    assert log.append([posted("b")], after=9) == 10
    assert names(log.read(Cursor(9))[0]) == [["b"]]
    with pytest.raises(BadLog, match="position 10 after 1"):
        log.read(START)


def test_a_full_disk_leaves_the_log_as_it_was(log: FreshLog) -> None:
    log.append([posted("a")])
    (path,) = log.folder.glob("*.log")
    size = path.stat().st_size
    script = f"""
import resource, signal
from pathlib import Path
from indexer.errors import NotWritten
from tests.unit.indexer.test_fresh_log import FreshLog, posted
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 50}, {size + 50}))
try:
    FreshLog(Path({str(log.folder)!r})).append([posted("b")])
except NotWritten as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": "."})
    assert "could not be written" in done.stdout, done.stderr
    assert path.stat().st_size == size
    assert log.append([posted("c")]) == 2


def test_nothing_is_appended_to_a_segment_whose_fsync_failed(log: FreshLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state on disk is unknown: the next process to append rewrites the segment first."""
    log.append([posted("a")])
    (path,) = log.folder.glob("*.log")
    failed = path.stat().st_ino
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == failed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NotWritten, match="Input/output error"):
        log.append([posted("b")])
    assert path.stat().st_ino == failed
    other = FreshLog(log.folder)
    assert other.append([posted("c")]) == 3  # fsync of the old file would still fail
    assert path.stat().st_ino != failed
    assert names(log.read(START)[0]) == [["a"], ["b"], ["c"]]  # readers may have seen the frame, so it stays
    assert sorted(each.name for each in log.folder.iterdir()) == [path.name, "LOCK"]


def test_a_segment_that_cannot_be_rewritten_accepts_nothing(log: FreshLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append([posted("a")])
    (path,) = log.folder.glob("*.log")
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        with pytest.raises(NotWritten):
            log.append([posted("b")])
        size = path.stat().st_size
        for writer in (log, FreshLog(log.folder)):
            with pytest.raises(NotWritten):
                writer.append([posted("c")])
        assert path.stat().st_size == size
    assert FreshLog(log.folder).append([posted("d")]) == 3


def test_an_equal_change_is_acknowledged_only_after_the_first_is_on_disk(
    log: FreshLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that wrote it may have been killed before its fsync."""
    log.append([posted("a")])
    seen: list[tuple[list[list[str]], int]] = []

    def nothing(frames: Sequence[Frame], segment: int) -> list[Change]:
        seen.append((names(list(frames)), segment))
        return []

    assert log.change(START, nothing) == 1
    assert seen == [([["a"]], 1)]

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(NotWritten):
        log.change(START, nothing)


def test_changes_are_decided_under_the_lock_of_the_log(log: FreshLog) -> None:
    """Many writers append only if there are fewer than five frames; exactly five do."""
    log.append([posted("first")])

    def write(number: int) -> int:
        def decide(frames: Sequence[Frame], segment: int) -> list[Change]:
            return [posted(str(number))] if len(frames) < 5 else []

        return FreshLog(log.folder).change(START, decide)

    with ThreadPoolExecutor(8) as threads:
        positions = list(threads.map(write, range(24)))
    assert (max(positions), len(log.read(START)[0])) == (5, 5)


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritten):
        FreshLog(tmp_path / "file" / "fresh").append([posted("a")])
    (tmp_path / "fresh").write_text("")
    with pytest.raises(BadLog, match="cannot be read"):
        FreshLog(tmp_path / "fresh").read(START)


def test_a_refused_write_names_what_helps() -> None:
    for number, step in ((errno.EACCES, "let this user write there"), (errno.ENOSPC, "free some space")):
        assert f"; {step}," in str(NotWritten(Path("fresh"), OSError(number, os.strerror(number))))
