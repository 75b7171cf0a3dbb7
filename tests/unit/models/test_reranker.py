"""Rerankers: imported, exported and run, against transformers' own scores; other models are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from cli import main
from models.encoder.onnx import OnnxReranker
from models.encoder.pairs import PairReader, RerankerSpec
from models.encoder.spec import RERANKER_FILE, EncoderSpec, Variant
from models.encoder.torch_reranker import TorchReranker
from models.errors import BadEncoder, ExportError, ParityError
from models.export.parity import check_pairs
from models.export.pipeline import export
from models.export.reranker import FLOORS, Floor, export_reranker
from models.importing.checkpoint import import_encoder
from models.importing.options import ImportOptions
from models.importing.reranker import ImportedReranker
from tests.support.tiny_models import write_checkpoint, write_cross_encoder

ARCHITECTURES = ("bert", "xlm-roberta")


def imported(tmp_path: Path, architecture: str) -> Path:
    write_cross_encoder(tmp_path / "published", architecture)
    done = import_encoder(str(tmp_path / "published"), tmp_path / "reranker", ImportOptions())
    assert len({path.stat().st_mode for path in (tmp_path / "reranker").iterdir()}) == 1
    assert isinstance(done, ImportedReranker)
    assert done.difference < 1e-4
    return done.folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_graph_gives_the_scores_of_transformers(tmp_path: Path, architecture: str) -> None:
    folder = imported(tmp_path, architecture)
    # Random weights of two layers lose more in int8 than trained ones.
    floors = {**FLOORS, Variant.INT8: Floor(correlation=0.9, difference=2.0)}
    report = export_reranker(folder, tmp_path / "served", floors=floors)
    assert {graph.variant for graph in report.graphs} == set(Variant)
    assert report.spec.parity[Variant.FP32].correlation > 0.9999
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "published").eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "published" / "tokenizer.json"))
    pairs = [(query[:10], document[:20]) for query, document in check_pairs()[:40]]
    expected = []
    for query, document in pairs:
        inputs = tokenizer(query, document, return_tensors="pt", return_token_type_ids=architecture == "bert")
        with torch.inference_mode():
            expected.append(float(model(**inputs).logits[0, 0]))
    for variant in (Variant.FP32, Variant.FP16):
        reranker = OnnxReranker.load(report.folder, variant, threads=1)
        tokens = [reranker.tokenizer.pairs(query, [document])[0] for query, document in pairs]
        tolerance = 1e-4 if variant is Variant.FP32 else 2e-2
        # A batch of several lengths, and each text alone.
        assert reranker.score_tokens(tokens) == pytest.approx(np.array(expected), abs=tolerance)
        assert reranker.score(tokens) == pytest.approx(np.array(expected), abs=tolerance)


def test_a_reader_without_weights_has_the_same_fingerprint(tmp_path: Path) -> None:
    folder = export_reranker(imported(tmp_path, "bert"), tmp_path / "served", variants=[Variant.FP32]).folder
    reader, reranker = PairReader.open(folder), OnnxReranker.load(folder)
    assert reader.fingerprint == reranker.fingerprint
    assert reader.tokenizer.pairs("痛", ["发烧"]) == reranker.tokenizer.pairs("痛", ["发烧"])
    other = RerankerSpec.load(folder).model_copy(update={"max_length": 40})
    assert other.fingerprint(Variant.FP32.filename) != reader.fingerprint


def test_an_altered_file_is_refused(tmp_path: Path) -> None:
    folder = imported(tmp_path, "bert")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + " ", encoding="utf-8")
    with pytest.raises(BadEncoder, match=r"tokenizer.json was altered: its checksum differs from reranker.json"):
        TorchReranker.load(folder)


def test_a_graph_below_its_floor_is_refused(tmp_path: Path) -> None:
    floors = {Variant.FP32: Floor(correlation=1.1, difference=0.0)}
    with pytest.raises(ParityError, match="is not the reranker it was made from"):
        export_reranker(imported(tmp_path, "bert"), tmp_path / "served", variants=[Variant.FP32], floors=floors)
    assert not (tmp_path / "served").exists()


def test_a_folder_that_is_not_a_reranker_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path / "three", "bert", labels=3)
    with pytest.raises(BadEncoder, match="3 labels; a reranker has one"):
        import_encoder(str(tmp_path / "three"), tmp_path / "out", ImportOptions())
    write_cross_encoder(tmp_path / "modern", "modernbert")
    with pytest.raises(BadEncoder, match="a modernbert is not supported as a reranker, only bert, roberta"):
        import_encoder(str(tmp_path / "modern"), tmp_path / "out", ImportOptions())
    write_cross_encoder(tmp_path / "cross", "bert")
    with pytest.raises(BadEncoder, match=r"--space: .* is a cross-encoder"):
        import_encoder(str(tmp_path / "cross"), tmp_path / "out", ImportOptions(space="s"))
    with pytest.raises(BadEncoder, match="--beside names the second encoder of an --adapter"):
        import_encoder(str(tmp_path / "cross"), tmp_path / "out", ImportOptions(beside="small"))
    write_checkpoint(tmp_path / "plain", "bert")
    with pytest.raises(BadEncoder, match="BertModel gives no score"):
        TorchReranker.load(tmp_path / "plain")
    assert not (tmp_path / "out").exists()


def test_a_reranker_is_refused_as_an_encoder(tmp_path: Path) -> None:
    folder = imported(tmp_path, "bert")
    with pytest.raises(BadEncoder, match="is a reranker and makes no vectors; serve it with CARE_RERANKER"):
        EncoderSpec.load(folder)
    with pytest.raises(BadEncoder, match="is not a reranker folder"):
        RerankerSpec.load(tmp_path)
    (folder / RERANKER_FILE).write_text(json.dumps({"architecture": "bert", "max_length": 2, "separators": 1}))
    with pytest.raises(BadEncoder, match="max_length"):
        RerankerSpec.load(folder)
    with pytest.raises(ExportError, match="is there and is not an encoder folder"):
        export(tmp_path / "published", tmp_path, space="s")


def test_the_commands_import_show_and_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_cross_encoder(tmp_path / "published", "bert")
    places = [str(tmp_path / name) for name in ("published", "reranker", "served")]
    main(["encoder", "import", *places[:2], "--max-length", "40"])
    assert "a reranker;" in (shown := capsys.readouterr().out)
    assert "40 tokens a pair" in shown
    assert "care export" in shown
    main(["export", *places[1:], "--variants", "fp32"])
    assert "correlation 1.0" in capsys.readouterr().out
    main(["encoder", "show", places[2]])
    assert f"CARE_RERANKER={places[2]} care serve   (fp32)" in capsys.readouterr().out
    assert main(["export", places[1], str(tmp_path / "other"), "--dim", "8"]) != 0
    assert "--dim: " in capsys.readouterr().err
