"""From a checkpoint to an encoder folder: every architecture and variant, and no files left after a refusal."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
import torch

from models.encoder.folder import infer_spec
from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import POOLINGS, EncoderSpec, Pooling, Side, Variant
from models.encoder.torch import TorchEncoder, keep_layers
from models.errors import BadEncoder, ExportError, ParityError
from models.export import pipeline
from models.export.backbone import export_backbone
from models.export.command import add_arguments, run
from models.export.parity import CHECK_TEXTS, FLOORS, Floor
from models.export.pipeline import Backend, export
from tests.support.tiny_models import (
    ARCHITECTURES,
    tiny_encoder,
    tiny_tokenizer,
    write_checkpoint,
    write_new_checkpoint,
)

IMPOSSIBLE = Floor(cosine=1.1, worst_cosine=1.1, top10_overlap=1.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny_encoder("bert").save(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_is_exported_in_each_variant(architecture: str, tmp_path: Path) -> None:
    encoder = tiny_encoder(architecture, dim=48)
    encoder.save(tmp_path / "trained")
    report = export(tmp_path / "trained", tmp_path / "served", backend=Backend.TORCH)
    assert {path.name for path in tmp_path.iterdir()} == {"trained", "served"}
    files = {path.name for path in (tmp_path / "served").iterdir()}
    assert files == {"encoder.json", "tokenizer.json", "model.onnx", "model.fp16.onnx", "model.int8.onnx"}
    stored = EncoderSpec.load(tmp_path / "served")
    assert stored == report.spec
    assert set(stored.parity) == set(Variant)
    assert [graph.made_by for graph in report.graphs] == ["torch", "torch, onnxruntime", "torch, onnxruntime"]
    expected = encoder.encode(CHECK_TEXTS, Side.QUERY)
    tolerance = {Variant.FP32: 1e-5, Variant.FP16: 2e-2, Variant.INT8: 2e-1}
    for variant in Variant:
        vectors = OnnxEncoder.load(tmp_path / "served", variant).encode(CHECK_TEXTS, Side.QUERY)
        np.testing.assert_allclose(vectors, expected, atol=tolerance[variant])


def test_an_encoder_without_layers_averages_its_tokens_in_each_variant(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hub", "bert")
    encoder = TorchEncoder.load(tmp_path / "hub", infer_spec(tmp_path / "hub", space="s", pooling=Pooling.MEAN))
    keep_layers(encoder.backbone, 0)
    encoder.save(tmp_path / "trained")
    export(tmp_path / "trained", tmp_path / "served", optimum_python=Path(sys.executable))
    expected = encoder.encode(CHECK_TEXTS, Side.QUERY)
    for variant in Variant:
        served = OnnxEncoder.load(tmp_path / "served", variant)
        vectors = np.vstack([served.encode([text], Side.QUERY) for text in CHECK_TEXTS])
        np.testing.assert_allclose(vectors, expected, atol=2e-2)
        np.testing.assert_allclose(served.encode(CHECK_TEXTS, Side.QUERY), expected, atol=2e-2)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling_is_exported_without_encoder_json(pooling: Pooling, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hub", "bert")
    wanted = {"space": "s", "pooling": pooling, "dim": 16, "max_length": 40, "variants": [Variant.FP32]}
    export(tmp_path / "hub", tmp_path / "served", backend=Backend.TORCH, **wanted)
    spec = EncoderSpec.load(tmp_path / "served")
    assert (spec.space, spec.pooling, spec.dim, spec.max_length) == ("s", pooling, 16, 40)
    assert spec.parity[Variant.FP32].cosine > 0.99999


def test_scaled_rotary_positions_are_exported_in_each_variant(tmp_path: Path) -> None:
    """Positions as in gte-multilingual-base; Optimum cannot scale them and is not used."""
    expected = write_new_checkpoint(tmp_path / "hub").encode(CHECK_TEXTS, Side.QUERY)
    export(tmp_path / "hub", tmp_path / "served", space="s", pooling=Pooling.CLS)
    for variant in Variant:
        vectors = OnnxEncoder.load(tmp_path / "served", variant).encode(CHECK_TEXTS, Side.QUERY)
        np.testing.assert_allclose(vectors, expected, atol=2e-1)


def test_fp16_of_a_bert_is_fused(trained: Path, tmp_path: Path) -> None:
    import onnx

    export(trained, tmp_path / "served", variants=[Variant.FP16], backend=Backend.TORCH)
    kinds = [node.op_type for node in onnx.load(tmp_path / "served" / "model.fp16.onnx").graph.node]
    assert kinds.count("Attention") == 2
    assert kinds.count("SkipLayerNormalization") == 4
    assert kinds.count("EmbedLayerNormalization") == 1


@pytest.mark.parametrize("variant", list(Variant))
def test_an_export_below_the_floor_leaves_no_files(variant: Variant, trained: Path, tmp_path: Path) -> None:
    floors = {**FLOORS, variant: IMPOSSIBLE}
    with pytest.raises(ParityError, match=variant.filename):
        export(trained, tmp_path / "served", backend=Backend.TORCH, floors=floors)
    assert not list(tmp_path.iterdir())


def test_a_damaged_graph_is_refused_and_the_old_folder_stays(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    export(trained, served, variants=[Variant.FP32], backend=Backend.TORCH)
    before = {path.name: path.read_bytes() for path in served.iterdir()}

    def damaged(backbone: torch.nn.Module, path: Path) -> None:
        with torch.no_grad():
            backbone.encoder.layer[0].output.dense.weight.mul_(-1)
            export_backbone(backbone, path)
            backbone.encoder.layer[0].output.dense.weight.mul_(-1)

    monkeypatch.setattr("models.export.backbone.export_backbone", damaged)
    with pytest.raises(ParityError, match=r"model\.onnx is not the encoder"):
        export(trained, served, variants=[Variant.FP32], backend=Backend.TORCH)
    assert {path.name: path.read_bytes() for path in served.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


def test_a_new_export_replaces_the_old_graphs_and_keeps_the_model_card(trained: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    export(trained, served, variants=[Variant.FP32, Variant.FP16], backend=Backend.TORCH)
    (served / "README.md").write_text("card")
    (served / "figures").mkdir()
    (served / "figures" / "curve.svg").write_text("drawn by hand")
    export(trained, served, variants=[Variant.FP32], dim=8, backend=Backend.TORCH)
    names = {path.relative_to(served).as_posix() for path in served.rglob("*") if path.is_file()}
    assert names == {"encoder.json", "tokenizer.json", "model.onnx", "README.md", "figures/curve.svg"}
    assert OnnxEncoder.load(served).encode(["感冒"], Side.QUERY).shape == (1, 8)


def test_exports_of_one_encoder_share_an_identity_and_those_of_another_do_not(trained: Path, tmp_path: Path) -> None:
    tiny_encoder("bert", dim=16).save(tmp_path / "other")
    for name, variant in (("a", Variant.FP32), ("b", Variant.FP16)):
        export(trained, tmp_path / name, variants=[variant], backend=Backend.TORCH)
    one, two, own, other = (
        EncoderSpec.load(folder) for folder in (tmp_path / "a", tmp_path / "b", trained, tmp_path / "other")
    )
    assert not one.fingerprints & two.fingerprints
    assert one.identities & two.identities == own.identities
    assert not other.identities & own.identities


def optimum_folder(folder: Path) -> None:
    """Writes a folder as Optimum does: a graph with token types, the configuration, the tokenizer; no weights."""
    encoder = tiny_encoder("bert")
    encoder.backbone.config.save_pretrained(folder)
    export_backbone(encoder.backbone, folder / "model.onnx")
    tiny_tokenizer().save(str(folder / "tokenizer.json"))


def test_a_folder_exported_by_optimum_is_accepted_as_a_source(tmp_path: Path) -> None:
    import onnx

    optimum_folder(tmp_path / "given")
    names = [value.name for value in onnx.load(tmp_path / "given" / "model.onnx").graph.input]
    assert names == ["input_ids", "attention_mask", "token_type_ids"]
    wanted = {"space": "s", "pooling": Pooling.CLS, "backend": Backend.TORCH}
    report = export(tmp_path / "given", tmp_path / "served", **wanted)
    assert report.graphs[0].made_by == "given"
    vectors = OnnxEncoder.load(tmp_path / "served", Variant.FP32).encode(CHECK_TEXTS, Side.QUERY)
    np.testing.assert_allclose(vectors, tiny_encoder("bert").encode(CHECK_TEXTS, Side.QUERY), atol=1e-5)
    assert set(report.spec.parity) == set(Variant)
    with pytest.raises(BadEncoder, match="max_length 999 is more than the backbone's"):
        export(tmp_path / "given", tmp_path / "longer", max_length=999, **wanted)


def test_unusable_sources_and_targets_are_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExportError, match="source itself"):
        export(trained, trained)
    with pytest.raises(ExportError, match="not a folder"):
        export(tmp_path / "nowhere", tmp_path / "served")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExportError, match="neither weights"):
        export(tmp_path / "empty", tmp_path / "served")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ExportError, match="not an encoder folder"):
        export(trained, tmp_path / "mine")
    tiny_encoder("gte").save(tmp_path / "other")
    with pytest.raises(ExportError, match="holds a trained encoder, which an export would replace"):
        export(trained, tmp_path / "other")
    write_checkpoint(tmp_path / "hub", "bert")
    with pytest.raises(ExportError, match="--space"):
        export(tmp_path / "hub", tmp_path / "served")
    other = next(each for each in POOLINGS if each != EncoderSpec.load(trained).pooling)
    with pytest.raises(ExportError, match=f"vectors pooled by {other} need a --space of their own"):
        export(trained, tmp_path / "served", pooling=other)
    with pytest.raises(ExportError, match="dim 4096 is larger"):
        export(trained, tmp_path / "served", dim=4096)
    monkeypatch.setattr(pipeline, "LARGEST_BYTES", 1000)
    with pytest.raises(ExportError, match="above 2 GiB is exported by torch"):
        export(trained, tmp_path / "served", backend=Backend.OPTIMUM)
    assert not (tmp_path / "served").exists()


def test_an_exported_folder_is_refused_as_a_source(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "served", variants=[Variant.FP32], backend=Backend.TORCH)
    with pytest.raises(ExportError, match="exported already"):
        export(tmp_path / "served", tmp_path / "again")


def test_the_command_exports_and_prints_what_it_made(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    options = ["--variants", "fp32", "fp32", "--backend", "torch", "--dim", "32", "--space", "other"]
    run(parser.parse_args([str(trained), str(tmp_path / "served"), *options]))
    printed = capsys.readouterr().out
    assert printed.count("model.onnx") == 1
    assert "cosine 1.00000" in printed
    assert "32 dimensions, space other" in printed
