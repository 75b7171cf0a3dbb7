"""Collections: versions, the pointer, and versions that may not be published."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest

from indexer.errors import BadCollection, BadDisk, BadSnapshot, Busy
from indexer.store import files
from indexer.store.collection import Collection, new_version
from indexer.store.files import in_turn, mounted_with_local_locks
from indexer.store.snapshot import Snapshot
from indexer.versions import list_versions, prune, publish, rollback, verify
from tests.unit.indexer.support import add_version

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    return Collection(tmp_path / "collection")


def add(collection: Collection, day: int, **changes: object) -> str:
    return add_version(collection, START + timedelta(days=day), **changes)  # type: ignore[arg-type]


def damage(collection: Collection, version: str) -> None:
    with (collection.folder(version) / "vectors.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")


def test_a_new_collection_is_empty(collection: Collection) -> None:
    assert collection.current() is None
    assert collection.versions() == []
    assert list_versions(collection) == {}
    with pytest.raises(BadCollection, match="care index build makes one"):
        publish(collection)
    with pytest.raises(BadCollection, match="no published version"):
        rollback(collection)


def test_version_names_sort_by_time_and_differ() -> None:
    assert new_version(START).startswith("20260101T000000000Z-")
    assert new_version(START) != new_version(START)
    assert new_version(START) < new_version(START + timedelta(milliseconds=1))


def test_versions_keep_their_order_if_the_clock_is_set_back(collection: Collection) -> None:
    served, unpublished = (add(collection, day) for day in (10, 11))
    collection.publish(served)
    after = add(collection, 0)
    assert after[:18] == "20260112T000000001"
    collection.publish(after)
    assert rollback(collection) == served
    collection.publish(after)
    assert collection.prune(keep=1, keep_days=0, now=START) == [unpublished]
    (collection.root / "versions" / "zz-copy").mkdir()
    assert collection.next_version(START).startswith("20260101T000000000Z-")


def test_versions_are_published_listed_and_rolled_back(collection: Collection) -> None:
    first, second = add(collection, 1), add(collection, 2)
    assert collection.versions() == [first, second]
    assert collection.current() is None
    assert publish(collection, first) == collection.current() == first
    assert publish(collection) == collection.current() == second
    listed = list_versions(collection)
    assert [(version, made.counts.documents, made.counts.passages) for version, made in listed.items()] == [
        (first, 4, 5),
        (second, 4, 5),
    ]
    assert all(made.size_bytes and made.created for made in listed.values())
    assert rollback(collection) == collection.current() == first
    with pytest.raises(BadCollection, match="no version older"):
        rollback(collection)
    assert rollback(collection, second) == collection.current() == second


def test_rollback_skips_versions_that_were_never_published(collection: Collection) -> None:
    first = add(collection, 1)
    publish(collection)
    add(collection, 2)
    third = add(collection, 3)
    publish(collection, third)
    assert rollback(collection) == first


def test_rollback_never_returns_to_a_version_that_was_rolled_back_from(collection: Collection) -> None:
    first, second, bad, fourth = (add(collection, day) for day in (1, 2, 3, 4))
    for version in (first, second, bad):
        publish(collection, version)
    assert rollback(collection) == second
    publish(collection, fourth)
    assert collection.prune(keep=1, keep_days=0) == [first, bad]
    assert rollback(collection) == second


def test_rollback_goes_step_by_step_even_if_a_version_was_removed(collection: Collection) -> None:
    versions = [add(collection, day) for day in (1, 2, 3, 4)]
    for version in versions:
        publish(collection, version)
    shutil.rmtree(collection.folder(versions[2]))
    assert rollback(collection) == versions[1]
    assert rollback(collection) == versions[0]
    with pytest.raises(BadCollection, match="no version older"):
        rollback(collection)


def test_rollback_never_goes_forward(collection: Collection) -> None:
    first, second = add(collection, 1), add(collection, 2)
    publish(collection, second)
    assert rollback(collection, first) == first
    with pytest.raises(BadCollection, match="no version older"):
        rollback(collection)


def test_rollback_to_a_damaged_version_does_not_move_the_pointer(collection: Collection) -> None:
    first, second = add(collection, 1), add(collection, 2)
    publish(collection, first)
    publish(collection, second)
    damage(collection, first)
    with pytest.raises(BadSnapshot, match="altered"):
        rollback(collection)
    assert collection.current() == second


def test_a_damaged_version_is_not_published(collection: Collection) -> None:
    first, second = add(collection, 1), add(collection, 2)
    publish(collection, first)
    damage(collection, second)
    with pytest.raises(BadSnapshot, match=r"vectors\.npy was altered"):
        publish(collection, second, force=True)
    assert collection.current() == first
    with pytest.raises(BadSnapshot, match=r"vectors\.npy was altered"):
        verify(collection, second)
    assert verify(collection).version == first


def test_the_list_shows_errors_of_a_version(collection: Collection) -> None:
    version = add(collection, 1)
    (collection.folder(version) / "manifest.json").unlink()
    (problem,) = list_versions(collection).values()
    assert isinstance(problem, BadSnapshot)
    assert "build did not finish" in str(problem)


@pytest.mark.parametrize("change", [{"space": "elsewhere"}, {"dim": 8}])
def test_a_change_of_space_needs_force(collection: Collection, change: dict[str, object]) -> None:
    first, second = add(collection, 1), add(collection, 2, **change)
    publish(collection, first)
    with pytest.raises(BadCollection, match="--force"):
        publish(collection, second)
    assert collection.current() == first
    publish(collection, second, force=True)
    assert rollback(collection) == first


def test_a_damaged_served_version_does_not_block_publishing_another(collection: Collection) -> None:
    first, second = add(collection, 1), add(collection, 2)
    publish(collection, first)
    (collection.folder(first) / "manifest.json").write_text("{", encoding="utf-8")
    assert publish(collection, second) == second


@pytest.mark.parametrize("operations", range(1, 12))
def test_a_rollback_never_goes_to_a_version_that_was_not_served(
    collection: Collection, monkeypatch: pytest.MonkeyPatch, operations: int
) -> None:
    """Stops a publication at each of its disk operations, as a kill would; another publication follows."""
    versions = [add(collection, day) for day in range(1, 5)]
    publish(collection, versions[0])
    publish(collection, versions[1])
    served = {versions[0], versions[1]}
    left = operations

    def ends_after(operation: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            operation(*arguments)

        return run

    with monkeypatch.context() as killed, contextlib.suppress(KeyboardInterrupt):
        killed.setattr(os, "replace", ends_after(os.replace))
        killed.setattr(os, "fsync", ends_after(os.fsync))
        publish(collection, versions[2])
    served.add(str(collection.current()))
    before = collection.current()
    assert (collection.root / "PUBLISHED").read_text().split()[-1] in served
    publish(collection, versions[3])
    assert rollback(collection) == before
    while (target := collection.previous()) is not None:
        assert target in served
        rollback(collection)
    assert collection.current() == versions[0]


def test_a_rollback_without_the_list_of_published_versions_needs_a_name(collection: Collection) -> None:
    first, second = add(collection, 1), add(collection, 2)
    publish(collection, second)
    (collection.root / "PUBLISHED").unlink()
    with pytest.raises(BadCollection, match="name the version"):
        rollback(collection)
    assert rollback(collection, first) == first


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_an_unreadable_pointer_is_reported(collection: Collection, content: bytes | None) -> None:
    pointer = collection.root / "CURRENT"
    collection.root.mkdir(parents=True, exist_ok=True)
    if content is None:
        pointer.mkdir()
    else:
        pointer.write_bytes(content)
    with pytest.raises(BadCollection, match="CURRENT is not readable"):
        collection.current()


def test_what_this_user_may_not_read_says_so(collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crontab of another user, or its umask, makes such files; root, who may run this, reads every file."""
    folder = collection.folder(add(collection, 1))

    def deny(path: Path, *_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_text", deny)
    with pytest.raises(BadCollection, match=r"CURRENT is not readable .* let this user read it"):
        collection.current()
    monkeypatch.setattr(Path, "read_bytes", deny)
    with pytest.raises(BadSnapshot, match=r"manifest\.json may not be read by this user; change its permissions"):
        Snapshot.open(folder)


def test_a_version_folder_under_another_name_is_refused(collection: Collection) -> None:
    version = add(collection, 1)
    collection.folder(version).rename(collection.root / "versions" / "renamed")
    with pytest.raises(BadSnapshot, match=f"says it is version {version}"):
        publish(collection, "renamed")


@pytest.mark.parametrize("name", ["nope", "", "../versions", ".building-x"])
def test_unknown_version_is_refused(collection: Collection, name: str) -> None:
    version = add(collection, 1)
    with pytest.raises(BadCollection, match=f"no version .*it has {version}"):
        collection.folder(name)


def test_a_failed_build_leaves_no_files(collection: Collection) -> None:
    def build() -> None:
        with collection.building("v") as folder:
            (folder / "documents.bin").write_bytes(b"half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build()
    assert list((collection.root / "versions").iterdir()) == []


def test_a_killed_build_is_not_a_version(collection: Collection) -> None:
    version = add(collection, 1)
    (collection.root / "versions" / ".building-later").mkdir()
    assert collection.versions() == [version]


def test_the_error_of_a_second_builder_names_the_process_of_the_first(collection: Collection) -> None:
    code = (
        "import sys; from pathlib import Path; from indexer.store.collection import Collection\n"
        "with Collection(Path(sys.argv[1])).sole_builder():\n"
        "    print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(collection.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "in\n"
            with pytest.raises(Busy, match=f"process {other.pid} on .+ is at work on {collection.root}") as busy:
                prune(collection, keep=1, keep_days=None)
            assert busy.value.exit_code == 75
        finally:
            other.kill()
    with collection.sole_builder():  # the system releases the lock of a killed process
        assert (collection.root / "LOCK").read_text() == f"{os.getpid()} on {platform.node()}\n"


def test_a_builder_removes_files_of_a_dead_builder(collection: Collection) -> None:
    version = add(collection, 1)
    for name in (".building-x", ".removing-y"):
        (collection.root / "versions" / name).mkdir()
        (collection.root / "versions" / name / "half").write_text("")
    with collection.sole_builder():
        assert [path.name for path in (collection.root / "versions").iterdir()] == [version]


NOW = START + timedelta(days=100)


def test_prune_keeps_by_count_and_by_age(collection: Collection) -> None:
    versions = [add(collection, day) for day in (1, 50, 97, 98, 99)]
    (collection.root / "rejects").mkdir()
    for version in versions:
        (collection.root / "rejects" / f"{version}.jsonl").write_text("")
    assert collection.prune(keep=2, keep_days=20, now=NOW) == versions[:2]
    assert collection.prune(keep=2, keep_days=0, now=NOW) == versions[2:3]
    assert collection.prune(keep=2, keep_days=0, now=NOW) == []
    assert collection.versions() == versions[3:]
    assert [path.stem for path in sorted((collection.root / "rejects").iterdir())] == versions[3:]
    assert collection.prune(keep=0, keep_days=1.5, now=NOW) == versions[3:4]


def test_prune_keeps_the_served_version_and_the_rollback_target(collection: Collection) -> None:
    versions = [add(collection, day) for day in range(1, 7)]
    for version in (versions[1], versions[3]):
        collection.publish(version)
    assert collection.prune(keep=1, keep_days=0, now=NOW) == [versions[0], versions[2], versions[4]]
    assert rollback(collection) == versions[1]
    assert collection.prune(keep=0, keep_days=0, now=NOW) == [versions[3], versions[5]]
    assert collection.versions() == [versions[1]]


def test_prune_needs_to_be_given_what_to_keep(collection: Collection) -> None:
    with pytest.raises(BadCollection, match="give --keep, --keep-days or both"):
        prune(collection, None, None)


def test_manual_prune_removes_unfinished_work(collection: Collection) -> None:
    add(collection, 1)
    shard = collection.shards("fingerprint") / "shard.npy"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"")
    prune(collection, keep=5, keep_days=None)
    assert shard.exists()
    prune(collection, keep=5, keep_days=None, unfinished=True)
    assert not shard.exists()


def test_a_version_is_not_pruned_while_it_is_being_published(
    collection: Collection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning waits, then sees that the version is served."""
    first, second = add(collection, 1), add(collection, 2)
    opened, pruned = threading.Event(), threading.Thread(target=collection.prune, args=(0, 0, NOW))
    open_snapshot = Snapshot.open

    def open_slowly(folder: Path) -> Snapshot:
        pruned.start()
        opened.set()
        pruned.join(0.2)  # long enough to do harm if it did not wait
        return open_snapshot(folder)

    monkeypatch.setattr(Snapshot, "open", open_slowly)
    collection.publish(first)
    pruned.join()
    assert opened.is_set()
    assert collection.versions() == [first]
    assert collection.current() == first
    assert second not in collection.versions()


def test_a_failed_swap_keeps_the_old_pointer(collection: Collection, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = add(collection, 1), add(collection, 2)
    publish(collection, first)

    def fail(*paths: Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            publish(collection, second)
    assert collection.current() == first


def test_readers_see_one_version_or_the_other(collection: Collection) -> None:
    """A reader that polls the pointer while it moves never finds it empty, half-written or missing."""
    versions = [add(collection, day) for day in (1, 2)]
    publish(collection, versions[0])
    seen, done = set(), threading.Event()

    def poll() -> None:
        while not done.is_set():
            seen.add(collection.current())

    reader = threading.Thread(target=poll)
    reader.start()
    for turn in range(20):
        publish(collection, versions[turn % 2])
    done.set()
    reader.join()
    assert seen <= set(versions)
    assert [path.name for path in collection.root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("mount", "refused"),
    [
        ("server:/care /srv/care nfs4 rw,vers=4.2,local_lock=none 0 0", False),
        ("server:/care /srv/care nfs rw,vers=3,nolock,local_lock=all 0 0", True),
        ("server:/care /srv nfs rw,vers=3,local_lock=flock 0 0", True),
        ("server:/care /srv nfs rw,vers=3,local_lock=all 0 0\n/dev/sdb /srv/care ext4 rw 0 0", False),
        ("server:/care /srv/car nfs rw,nolock 0 0", False),
        ("/dev/sda /srv/care ext4 rw,nolock 0 0", False),
        ("server:/care /srv/care\\040too nfs rw,nolock 0 0", False),
    ],
)
def test_a_network_file_system_with_local_locks_is_refused(mount: str, refused: bool) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\n{mount}\n"
    assert bool(mounted_with_local_locks(Path("/srv/care/collection"), mounts)) == refused


def test_a_collection_on_such_a_file_system_is_neither_built_nor_published(
    collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = add(collection, 1)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/care {collection.root} nfs rw,vers=3,nolock 0 0\n", encoding="utf-8")
    monkeypatch.setattr(files, "MOUNTS", mounts)
    files.local_locks.cache_clear()
    try:
        with pytest.raises(BadDisk, match=r"mounted as nfs with nolock\).*mount it with"), collection.sole_builder():
            pass
        with pytest.raises(BadDisk, match="mounted as nfs with nolock"):
            publish(collection, version)
        assert collection.current() is None
    finally:
        files.local_locks.cache_clear()


def test_a_file_system_without_locks_is_refused_with_the_remedy(
    collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BadDisk, match="mount it with locks"), collection.sole_builder():
        pass
    with pytest.raises(BadDisk, match="No locks available"), in_turn(tmp_path / "LOCK"):
        pass


def test_the_lock_is_on_a_file_opened_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client keeps locks on folders local, and grants exclusive locks only on files open for writing."""
    flock = fcntl.flock

    def look(file: object, operation: int) -> None:
        descriptor = file.fileno()  # type: ignore[attr-defined]
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", look)
    with in_turn(tmp_path / "LOCK"):
        assert (tmp_path / "LOCK").is_file()
