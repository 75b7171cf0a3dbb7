"""Encoding on several devices of one machine; "cpu,cpu" takes the same path as two GPUs."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from cli import main
from indexer import devices
from indexer.build import BuildOptions, build
from indexer.devices import DeviceEncoder, is_spread, parse_devices
from indexer.errors import BadBuild
from indexer.store.collection import Collection
from indexer.store.kinds import IndexKind
from indexer.store.shards import Shards
from indexer.versions import verify
from models.encoder.spec import Side
from tests.support.device_encoder import open_another, open_deadly, open_nothing, open_recording
from tests.support.fast_encoder import FastEncoder
from tests.unit.indexer.support import write_lines

TEXTS, SHARD = 40, 4
TWO = ("cpu", "cpu")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "c.jsonl", *({"_id": str(n), "text": f"第{n}种药的用法"} for n in range(TEXTS)))


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def test_devices_are_given_by_name_or_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_devices("cuda:0,cuda:3") == ("cuda:0", "cuda:3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert parse_devices("all") == ("cuda:0", "cuda:1", "cuda:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BadBuild, match="no GPU is seen here"):
        parse_devices("all")
    with pytest.raises(BadBuild, match="give cpu, cuda, cuda:N"):
        parse_devices("cuda:0,gpu")
    assert [is_spread(names) for names in ((), ("cpu",), ("cuda",), ("cuda:1",), TWO)] == [False] * 3 + [True] * 2


def test_all_counts_the_gpus_of_the_machine_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_torch(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "import_module", no_torch)
    monkeypatch.setattr(devices, "GPU_FOLDERS", tmp_path)
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert parse_devices("all") == ("cuda:0", "cuda:1")


def test_two_devices_share_the_shards_and_give_the_result_of_one(corpus: Path, tmp_path: Path, notes: Path) -> None:
    alone, both = Collection(tmp_path / "alone"), Collection(tmp_path / "both")
    # HNSW, because its recall is measured with queries that this process encodes afterwards.
    options = BuildOptions(shard_texts=SHARD, index=IndexKind.HNSW)
    expected = build([corpus], FastEncoder(swayed=True), alone, options)
    with closing(DeviceEncoder(TWO, partial(open_recording, notes))) as encoder:
        spread = BuildOptions(shard_texts=SHARD, index=IndexKind.HNSW, encode=encoder.encode_shards)
        found = build([corpus], encoder, both, spread)
    assert found.encoded == expected.encoded == TEXTS
    assert verify(both, found.version).content == verify(alone, expected.version).content
    processes = {path.name.partition("-")[0] for path in notes.iterdir()}
    assert len(processes) == 3  # two for the shards, and this one for the queries


def test_each_process_sees_only_its_gpu(notes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    place = Collection(tmp_path / "c").shards("fast")
    with closing(DeviceEncoder(("cuda:0", "cuda:1"), partial(open_recording, notes))) as encoder:
        shards = ([f"text {number}"] for number in range(8))
        assert list(encoder.encode_shards(shards, encoder, Shards(place))) == [1] * 8
    assert {tuple(path.name.split("-")[1:3]) for path in notes.iterdir()} == {("cuda", "4"), ("cuda", "6")}
    with pytest.raises(BadBuild, match="cuda:2: CUDA_VISIBLE_DEVICES shows 2 GPUs"):
        DeviceEncoder(("cuda:2",), partial(open_recording, notes))


def test_a_dying_process_loses_only_its_current_shard(corpus: Path, tmp_path: Path, notes: Path) -> None:
    collection = Collection(tmp_path / "collection")
    with closing(DeviceEncoder(TWO, partial(open_deadly, notes))) as encoder:
        options = BuildOptions(shard_texts=SHARD, encode=encoder.encode_shards)
        with pytest.raises(BadBuild, match=r"cpu: its process died.*run the same command again"):
            build([corpus], encoder, collection, options)
    with closing(DeviceEncoder(TWO, partial(open_recording, notes))) as encoder:
        summary = build([corpus], encoder, collection, BuildOptions(shard_texts=SHARD, encode=encoder.encode_shards))
    assert summary.encoded + summary.reused == TEXTS
    assert summary.reused >= TEXTS // 2


def test_a_device_that_cannot_open_the_encoder_is_reported_with_the_reason() -> None:
    with pytest.raises(BadBuild, match="cpu: there are no weights here"):
        DeviceEncoder(TWO, open_nothing)


def test_devices_that_compute_other_vectors_are_refused() -> None:
    with pytest.raises(BadBuild, match="cuda computes in another precision than cpu"):
        DeviceEncoder(("cpu", "cuda"), open_another)


def test_the_command_with_the_real_encoder_gives_the_same_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"_id": str(n), "text": f"第{n}种药每日服用{n}次，饭后服用。"} for n in range(12)]
    corpus = str(write_lines(tmp_path / "corpus.jsonl", *rows))
    contents = []
    for name, device in (("one", []), ("two", ["--device", "cpu,cpu"])):
        root = tmp_path / name
        own = ["--collection", str(root), "--shard", "3", "--threads", "1", "--publish"]
        assert main(["index", "build", corpus, *own, *device]) == 0
        contents.append(verify(Collection(root)).content)
    assert contents[0] == contents[1]
    assert main(["index", "build", corpus, *own, "--device", "cpu,tpu"]) == 1
    assert main(["index", "build", corpus, *own, "--device", "cpu,cpu", "--ray", "local"]) == 1
    assert "--ray finds the devices of its nodes" in capsys.readouterr().err


def test_queries_are_encoded_in_this_process_after_the_device_processes_ended(notes: Path) -> None:
    with closing(DeviceEncoder(TWO, partial(open_recording, notes))) as encoder:
        assert encoder.encode(["痛"], Side.QUERY).shape == (1, encoder.spec.dim)
