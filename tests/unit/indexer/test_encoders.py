"""The backend of an encoder folder: its ONNX graph, or torch if it has only weights or a precision is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cli
from indexer.build import BuildOptions, build
from indexer.errors import BadBuild
from indexer.reindex import Encoders
from indexer.store.collection import Collection
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import OnnxEncoder
from models.encoder.packed.encoder import PackedEncoder
from models.encoder.spec import Precision, Side, Variant
from models.errors import BadEncoder
from tests.support.tiny_models import tiny_encoder

BUNDLED = Path("models/pretrained/care-small-zh")
ROWS = [{"_id": str(row), "text": f"高血压患者第{row}次复查"} for row in range(5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "encoder"
    tiny_encoder("qwen3").save(target)
    return target


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return path


def test_a_graph_is_run_by_onnx_runtime_and_weights_alone_by_torch(folder: Path) -> None:
    assert isinstance(Encoders(BUNDLED, threads=1).load(), OnnxEncoder)
    assert isinstance(Encoders(folder, devices=("cpu",)).load(), PackedEncoder)


def test_torch_needs_weights_and_refuses_a_variant(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadBuild, match="--variant int8"):
        Encoders(folder, Variant.INT8).load()
    with pytest.raises(BadEncoder, match="no safetensors weights"):
        Encoders(BUNDLED, precision=Precision.BF16, devices=("cpu",)).load()
    with pytest.raises(BadEncoder, match="is not an encoder folder"):
        Encoders(tmp_path / "nowhere").load()


def test_a_build_by_torch_reuses_vectors_and_records_the_precision(folder: Path, corpus: Path) -> None:
    collection = Collection(corpus.parent / "collection")
    encoder = PackedEncoder.load(folder, device="cpu")
    summary = build([corpus], encoder, collection, BuildOptions(passage_tokens=40, overlap=8))
    assert (summary.encoded, summary.reused) == (5, 0)
    snapshot = Snapshot.open(summary.folder)
    assert snapshot.manifest.encoder.fingerprint == encoder.fingerprint
    assert snapshot.manifest.encoder.variant == "fp32"
    query = encoder.encode([ROWS[3]["text"]], Side.DOCUMENT)
    scores, rows = snapshot.vectors.search(query, 1)
    assert rows[0, 0] == 3
    assert scores[0, 0] > 0.999
    again = build(
        [corpus], PackedEncoder.load(folder, device="cpu"), collection, BuildOptions(passage_tokens=40, overlap=8)
    )
    assert (again.encoded, again.reused) == (0, 5)
    narrow = PackedEncoder.load(folder, device="cpu", precision=Precision.FP8)
    assert build([corpus], narrow, collection, BuildOptions(passage_tokens=40, overlap=8)).encoded == 5


def test_the_command_takes_the_options_of_torch(
    folder: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    collection = Collection(corpus.parent / "collection")
    options = ["--device", "cpu", "--precision", "bf16", "--token-budget", "64", "--passage-tokens", "40"]
    words = ["index", "build", corpus, "--encoder", folder, "--collection", collection.root, "--overlap", 8, *options]
    assert cli.main([str(word) for word in words]) == 0
    assert "5 passages (5 encoded, 0 reused)" in capsys.readouterr().out
    assert Snapshot.open(collection.folder(collection.versions()[0])).manifest.encoder.variant is Precision.BF16
