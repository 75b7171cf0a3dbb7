"""The parity check between an exported graph and its encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from models.encoder.spec import Side, Variant, sha256_of
from models.errors import ParityError
from models.export.backbone import append_head, export_backbone
from models.export.parity import CHECK_TEXTS, FLOORS, Floor, check_parity, top_overlap
from tests.support.tiny_models import tiny_encoder


def unit(rows: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, 16)).astype(np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def test_check_texts_are_many_and_varied_and_some_are_truncated() -> None:
    lengths = [len(text) for text in CHECK_TEXTS]
    assert len(set(CHECK_TEXTS)) == len(CHECK_TEXTS) >= 64
    assert min(lengths) == 1
    assert sum(length > 512 for length in lengths) >= 3
    assert any(text.isascii() for text in CHECK_TEXTS)


def test_overlap_of_the_same_and_of_unrelated_vectors() -> None:
    reference = unit(60)
    assert top_overlap(reference, reference) == 1.0
    assert top_overlap(unit(60, seed=1), reference) < 0.4


def test_overlap_is_the_share_of_neighbours_kept() -> None:
    reference = unit(40)
    moved = reference.copy()
    moved[0] = -reference[0]  # the first text's ten nearest become its ten farthest
    assert top_overlap(moved, reference) == pytest.approx(39 / 40)


def test_every_variant_has_a_floor_and_floors_fall_with_precision() -> None:
    floors = [FLOORS[variant] for variant in (Variant.FP32, Variant.FP16, Variant.INT8)]
    for name in ("cosine", "worst_cosine", "top10_overlap"):
        values = [getattr(floor, name) for floor in floors]
        assert values == sorted(values, reverse=True)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("exported")
    encoder = tiny_encoder("bert")
    export_backbone(encoder.backbone, folder / "backbone.onnx")
    model = onnx.load(folder / "backbone.onnx")
    append_head(model, encoder.spec)
    onnx.save(model, folder / "model.onnx")
    (folder / "tokenizer.json").write_text(encoder.tokenizer_json, encoding="utf-8")
    checksums = {name: sha256_of(folder / name) for name in ("tokenizer.json", "model.onnx")}
    encoder.spec.model_copy(update={"checksums": checksums}).save(folder)
    return folder, encoder.encode(CHECK_TEXTS, Side.QUERY)


def test_a_correct_graph_passes(exported: tuple[Path, np.ndarray]) -> None:
    parity = check_parity(*exported_args(exported), FLOORS[Variant.FP32])
    assert parity.cosine > 0.99999
    assert parity.top10_overlap == 1.0
    assert parity.texts == len(CHECK_TEXTS)


@pytest.mark.parametrize("fault", ["turned", "one text", "not a number"])
def test_a_wrong_graph_is_refused(exported: tuple[Path, np.ndarray], fault: str) -> None:
    folder, variant, reference = exported_args(exported)
    reference = reference.copy()
    if fault == "turned":
        reference = np.roll(reference, 1, axis=1)
    elif fault == "one text":
        reference[7] = -reference[7]
    else:
        reference[7] = np.nan
    floor = Floor(cosine=0.9, worst_cosine=0.9, top10_overlap=0.0)
    with pytest.raises(ParityError, match=r"model\.onnx is not the encoder"):
        check_parity(folder, variant, reference, floor)


def test_different_neighbours_are_refused_whatever_the_cosines(exported: tuple[Path, np.ndarray]) -> None:
    folder, variant, reference = exported_args(exported)
    turned = np.roll(reference, 1, axis=1)
    assert check_parity(folder, variant, turned, Floor(-1.0, -1.0, top10_overlap=0.0)).top10_overlap < 0.9
    with pytest.raises(ParityError, match=r"top-10 overlap 0\.\d+ \(0\.9\)"):
        check_parity(folder, variant, turned, Floor(-1.0, -1.0, top10_overlap=0.9))


def exported_args(exported: tuple[Path, np.ndarray]) -> tuple[Path, Variant, np.ndarray]:
    return exported[0], Variant.FP32, exported[1]
