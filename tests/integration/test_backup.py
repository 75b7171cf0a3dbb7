"""`care backup` of a collection in service, restored into an empty folder and served from there."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import random
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cli
from indexer import restore
from indexer.backup import write_backup
from indexer.errors import BadBackup, BadCollection, BadSnapshot, Busy
from indexer.restore import restore_backup
from indexer.store.collection import Collection
from models.encoder.onnx import OnnxEncoder
from tests.api.support import Built, build_collection, make_settings, running

pytestmark = pytest.mark.anyio
NOTICE = {"id": "notice-7", "title": "缬沙坦召回", "text": "部分批次的缬沙坦片自即日起召回。"}


@pytest.fixture
def built(tmp_path: Path, encoder: OnnxEncoder) -> Built:
    return build_collection(tmp_path / "collection", encoder)


def test_a_backup_replaces_files_alone_and_follows_links(
    built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, link, disk = tmp_path / "pipe", tmp_path / "link.tar", tmp_path / "disk"
    os.mkfifo(pipe)
    disk.mkdir()
    link.symlink_to(disk / "care.tar")
    assert cli.main(["backup", str(pipe), "--collection", str(built.root)]) == 1
    assert f"{pipe} is not a file" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert cli.main(["backup", str(link), "--collection", str(built.root)]) == 0
    assert link.is_symlink()
    assert tarfile.is_tarfile(disk / "care.tar")


async def answers(root: Built) -> dict[str, Any]:
    """Returns answers of a service over the collection to a few requests."""
    output: dict[str, Any] = {}
    async with running(make_settings(root)) as client:
        for query in ("高血压吃什么药", "缬沙坦召回", "头痛"):
            result = (await client.post("/v1/search", json={"query": query, "top_k": 5})).json()
            output[query] = [(hit["id"], hit["score"]) for hit in result["results"][0]["hits"]]
        output["deleted"] = (await client.get("/v1/documents/a-5")).status_code
        output["snapshot"] = result["snapshot"]
    return output


async def test_a_restored_collection_gives_the_same_answers(built: Built, tmp_path: Path) -> None:
    keys, (file, other) = tmp_path / "keys.json", (tmp_path / "care.tar", tmp_path / "other")
    keys.write_text('{"keys": [{"name": "a", "hash": "0"}]}', encoding="utf-8")
    (built.root / "page.json").write_text('{"en": {"title": "Manuals"}}', encoding="utf-8")
    async with running(make_settings(built)) as client:
        assert (await client.post("/v1/documents", json={"documents": [NOTICE]})).status_code == 200
        assert (await client.delete("/v1/documents/a-5")).status_code == 200
        # While the service runs.
        given = ["--collection", str(built.root), "--keys", str(keys)]
        assert cli.main(["backup", str(file), *given]) == 0
    before = await answers(built)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    moved = tmp_path / "restored" / "keys.json"
    assert cli.main(["restore", str(file), "--collection", str(other), "--keys", str(moved)]) == 0
    shutil.rmtree(built.root)
    restored = Built(other, built.versions)
    assert await answers(restored) == before
    assert before["deleted"] == 404
    assert before["缬沙坦召回"][0][0] == "notice-7"
    assert Collection(other).versions() == sorted(built.versions.values())
    assert json.loads((other / "page.json").read_text(encoding="utf-8")) == {"en": {"title": "Manuals"}}
    assert (moved.read_text(encoding="utf-8"), stat.S_IMODE(moved.stat().st_mode)) == (
        '{"keys": [{"name": "a", "hash": "0"}]}',
        0o600,
    )
    # The restored collection accepts another version and another document.
    async with running(make_settings(restored)) as client:
        assert (await client.post("/v1/documents", json={"documents": [NOTICE | {"id": "n-8"}]})).status_code == 200
        assert (await client.post("/admin/rollback", params={"version": built.versions["b"]})).status_code == 200


def test_a_restore_does_not_overwrite_anything(built: Built, tmp_path: Path) -> None:
    file = tmp_path / "care.tar"
    write_backup(Collection(built.root), file)
    with pytest.raises(BadBackup, match="is not empty"):
        restore_backup(file, built.root)
    keys = tmp_path / "keys"
    keys.touch()
    with pytest.raises(BadBackup, match="exists"):
        restore_backup(file, tmp_path / "new", keys)


def test_a_backup_that_cannot_be_made_is_refused_with_the_reason(built: Built, tmp_path: Path) -> None:
    collection = Collection(built.root)
    with pytest.raises(BadBackup, match="nothing to back up"):
        write_backup(Collection(tmp_path / "none"), tmp_path / "care.tar")
    with pytest.raises(BadBackup, match="no such file of keys"):
        write_backup(collection, tmp_path / "care.tar", tmp_path / "keys")
    for content in ("# Notes", "[]", '{"x": 1}', '{"keys": [{"id": "z"}]}', '{"keys": 7}'):
        (tmp_path / "keys").write_text(content, encoding="utf-8")
        with pytest.raises(BadBackup, match="is not a file of keys"):
            write_backup(collection, tmp_path / "care.tar", tmp_path / "keys")
    with collection.sole_builder(), pytest.raises(Busy):
        write_backup(collection, tmp_path / "care.tar")
    assert [path.name for path in tmp_path.glob("*care.tar*")] == []


def test_a_backup_without_the_served_version_is_refused(built: Built, tmp_path: Path) -> None:
    collection = Collection(built.root)
    shutil.rmtree(collection.folder(built.versions["a"]))
    with pytest.raises(BadCollection, match=f"no version {built.versions['a']}; it has {built.versions['b']}"):
        write_backup(collection, tmp_path / "care.tar")
    assert not list(tmp_path.glob("*care.tar*"))


def test_an_empty_variable_names_no_file_of_keys(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compose file sets it so."""
    monkeypatch.setenv("CARE_KEYS_FILE", "")
    file, folder = str(tmp_path / "care.tar"), str(tmp_path / "restored")
    assert cli.main(["backup", file, "--collection", str(built.root)]) == 0
    assert cli.main(["restore", file, "--collection", folder]) == 0


def test_a_second_backup_does_not_change_the_file_of_the_first(built: Built, tmp_path: Path) -> None:
    collection, partial = Collection(built.root), tmp_path / ".care.tar.new"
    partial.write_bytes(b"as far as the first one has written")
    with collection.sole_builder(), pytest.raises(Busy):
        write_backup(collection, tmp_path / "care.tar")
    assert partial.read_bytes() == b"as far as the first one has written"


def test_a_partial_file_that_is_a_link_is_replaced_and_not_followed(built: Built, tmp_path: Path) -> None:
    other, file = tmp_path / "other", tmp_path / "care.tar"
    other.write_bytes(b"of someone else")
    other.chmod(0o644)
    (tmp_path / ".care.tar.new").symlink_to(other)
    write_backup(Collection(built.root), file)
    assert other.read_bytes() == b"of someone else"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not file.is_symlink()


def test_a_failed_restore_can_be_repeated(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, keys, moved, folder = (tmp_path / name for name in ("care.tar", "keys", "restored-keys", "restored"))
    keys.write_text("{}", encoding="utf-8")
    write_backup(Collection(built.root), file, keys)
    (folder / "lost+found").mkdir(parents=True)
    command = ["restore", str(file), "--collection", str(folder), "--keys", str(moved)]

    def fill_the_disk(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(restore, "_check", fill_the_disk)
        assert cli.main(command) == 1
    assert "run the same command again" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["lost+found"]
    assert cli.main(command) == 0
    assert Collection(folder).current() == Collection(built.root).current()
    assert moved.read_text(encoding="utf-8") == "{}"


def test_a_damaged_version_is_left_out_of_the_backup_and_reported(
    built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collection, file, folder = Collection(built.root), tmp_path / "care.tar", tmp_path / "restored"
    served, other = built.versions["a"], built.versions["b"]
    assert collection.current() == served
    (collection.folder(other) / "vectors.npy").write_bytes(b"")
    assert cli.main(["backup", str(file), "--collection", str(built.root)]) == 0
    printed = capsys.readouterr()
    assert "vectors.npy has 0 bytes" in printed.err
    assert not restore_backup(file, folder), "no keys"
    assert Collection(folder).current() == served
    assert other not in Collection(folder).versions()
    (collection.folder(served) / "manifest.json").unlink()
    with pytest.raises(BadSnapshot, match=r"no manifest\.json"):
        write_backup(collection, file)
    restore_backup(file, tmp_path / "once-more")
    assert Collection(tmp_path / "once-more").current() == served


def test_a_damaged_or_foreign_file_publishes_nothing(built: Built, tmp_path: Path) -> None:
    file = tmp_path / "care.tar"
    write_backup(Collection(built.root), file)
    data = file.read_bytes()
    at = data.index("氨氯地平".encode())
    for number, damaged in enumerate(
        (data[:at] + b"x" + data[at + 1 :], data[: len(data) // 2 // 512 * 512], b"", b"no tar" * 1000)
    ):
        file.write_bytes(damaged)
        folder = tmp_path / f"restored-{number}"
        with pytest.raises(BadBackup):
            restore_backup(file, folder)
        assert Collection(folder).current() is None


def test_damage_behind_the_versions_is_refused_and_leaves_nothing(built: Built, tmp_path: Path) -> None:
    """tarfile takes an entry that it cannot read for the end of the archive."""
    file, keys = tmp_path / "care.tar", tmp_path / "keys"
    keys.write_text("{}", encoding="utf-8")
    collection = Collection(built.root)
    collection.fresh_log.folder.mkdir(exist_ok=True)
    (collection.fresh_log.folder / "00000000000000000001.log").touch()
    write_backup(collection, file, keys)
    data = file.read_bytes()
    with tarfile.open(file) as tar:
        entries = [entry for entry in tar if not entry.name.startswith("collection/versions/")][1:]
    assert [entry.name for entry in entries][-3:] == ["collection/CURRENT", "keys", "checksums.json"]
    places = [at for entry in entries for at in (entry.offset + 3, entry.offset_data) if entry.size]
    altered = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    for damaged in [*altered, *(data[: entry.offset] for entry in entries), data[:-10240]]:
        file.write_bytes(damaged)
        with pytest.raises(BadBackup, match=r"take another one|does not write"):
            restore_backup(file, tmp_path / "restored", tmp_path / "moved")
        assert not list((tmp_path / "restored").iterdir())
        assert not (tmp_path / "moved").exists()


def test_files_that_no_manifest_names_are_not_restored(built: Built, tmp_path: Path) -> None:
    file, version = tmp_path / "care.tar", built.versions["a"]
    write_backup(Collection(built.root), file)
    with tarfile.open(file) as tar:
        entries = [(entry, tar.extractfile(entry)) for entry in tar.getmembers()]
        with tarfile.open(tmp_path / "altered.tar", "w", format=tarfile.PAX_FORMAT) as altered:
            altered.addfile(*entries[0])
            for name in (f"{version}/correction.npy", f"{version}/lexical/more", ".hidden/more", "more"):
                altered.addfile(tarfile.TarInfo(f"collection/versions/{name}"), io.BytesIO())
            for entry in entries[1:]:
                altered.addfile(*entry)
    restore_backup(tmp_path / "altered.tar", tmp_path / "restored")
    restored = {
        path.relative_to(tmp_path / "restored") for path in (tmp_path / "restored").rglob("*") if path.is_file()
    }
    with tarfile.open(file) as tar:
        names = {name.removeprefix("collection/") for name in tar.getnames() if name.startswith("collection/")}
    assert {path.as_posix() for path in restored} == {name for name in names if not name.endswith(".lock")}


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_backup_is_restored_unless_it_is_damaged(
    built: Built, tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    file, collection = tmp_path / "care.tar", Collection(built.root)
    write_backup(collection, file)
    data = compress(file.read_bytes())
    file.write_bytes(data)
    restore_backup(file, tmp_path / "restored")
    assert Collection(tmp_path / "restored").current() == collection.current()
    middle = len(data) // 2
    for damaged in (data[:middle], data[:middle] + b"damaged" + data[middle + 7 :]):
        file.write_bytes(damaged)
        with pytest.raises(BadBackup):
            restore_backup(file, tmp_path / "other")


def test_a_damaged_block_of_a_large_bzip2_file_is_named_as_damage(tmp_path: Path) -> None:
    """Smaller files are one block, which is read when the file is opened."""
    file, keys = tmp_path / "care.tar.bz2", tmp_path / "keys"
    keys.write_bytes(random.Random(1).randbytes(2_000_000))
    facts = json.dumps({"format": 2, "versions": []}).encode()
    with tarfile.open(file, "w:bz2") as tar:
        entry = tarfile.TarInfo("backup.json")
        entry.size = len(facts)
        tar.addfile(entry, io.BytesIO(facts))
        tar.add(keys, "keys")
    data = file.read_bytes()
    file.write_bytes(data[:-20_000] + b"damaged" + data[-19_993:])
    # Its checksum stands behind the block: tarfile meets either that or nonsense in place of a header.
    with pytest.raises(BadBackup, match=r"(not a complete backup|not complete or was altered).*; take another"):
        restore_backup(file, tmp_path / "restored")


@pytest.mark.parametrize(
    "headers",
    [
        {"path": "collection/a\0b"},
        {"size": str(1 << 60)},
        {"GNU.sparse.map": "a,b", "GNU.sparse.size": "7"},
        {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 60)},
    ],
)
def test_a_header_of_any_content_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    facts = json.dumps({"format": 2, "versions": []}).encode()
    with tarfile.open(tmp_path / "care.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data, added in (("backup.json", facts, {}), ("keys", b"x", headers)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.pax_headers = len(data), added
            tar.addfile(entry, io.BytesIO(data))
    with pytest.raises(BadBackup, match=r"take another one|does not write"):
        restore_backup(tmp_path / "care.tar", tmp_path / "restored", tmp_path / "moved")
    assert not list((tmp_path / "restored").iterdir())


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("-")):
        with pytest.raises(BadBackup, match="is not a file; name the one"):
            restore_backup(path, tmp_path / "restored")


@pytest.mark.parametrize("facts", ["no JSON", "{}", "[]", '{"format": 1}'])
def test_a_tar_file_of_another_program_is_refused(tmp_path: Path, facts: str) -> None:
    (tmp_path / "backup.json").write_text(facts, encoding="utf-8")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "backup.json", "backup.json")
    with pytest.raises(BadBackup, match="was not written by care backup"):
        restore_backup(tmp_path / "other.tar", tmp_path / "folder")


def test_a_restore_prints_where_the_keys_are(
    built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CARE_KEYS_FILE", raising=False)
    keys, given = tmp_path / "keys", ["--keys", str(tmp_path / "moved")]
    keys.write_text("{}", encoding="utf-8")
    write_backup(Collection(built.root), tmp_path / "with.tar", keys)
    write_backup(Collection(built.root), tmp_path / "without.tar")
    for number, (name, options, output) in enumerate(
        (
            ("with.tar", given, f"; keys: {tmp_path / 'moved'}\n"),
            ("with.tar", [], "; its keys were left out (--keys says where they go)\n"),
            ("without.tar", ["--keys", str(tmp_path / "none")], "; the backup holds no keys\n"),
        )
    ):
        folder = str(tmp_path / f"restored-{number}")
        assert cli.main(["restore", str(tmp_path / name), "--collection", folder, *options]) == 0
        assert capsys.readouterr().out.endswith(output)


def test_an_archive_entry_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    facts, evil = tmp_path / "backup.json", tmp_path / "evil.tar"
    facts.write_text(json.dumps({"format": 2, "versions": []}), encoding="utf-8")
    for name in ("collection/../../outside", "/outside", "other/file"):
        with tarfile.open(evil, "w") as tar:
            tar.add(facts, "backup.json")
            tar.add(facts, name)
            tar.getmembers()[-1].name = name
        with pytest.raises(BadBackup, match="does not write"):
            restore_backup(evil, tmp_path / "folder" / "inner")
        assert not (tmp_path / "folder" / "outside").exists()
        shutil.rmtree(tmp_path / "folder")
