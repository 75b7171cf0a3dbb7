"""Encoders too large for one ONNX file; a low limit makes tiny encoders take that path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from models.encoder.onnx import OnnxEncoder
from models.encoder.spec import DATA_SUFFIX, EncoderSpec, Pooling, Side, Variant, sha256_of
from models.encoder.torch import Projection, TorchEncoder
from models.errors import BadEncoder
from models.export import pipeline
from models.export.large import BLOCK, ZERO, quantise_blocks
from models.export.parity import CHECK_TEXTS
from models.export.pipeline import Backend, export
from tests.support.tiny_models import ARCHITECTURES, WIDTH, tiny_encoder

TOLERANCE = {Variant.FP32: 1e-5, Variant.FP16: 2e-2, Variant.INT8: 5e-2}


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LARGEST_BYTES", 1000)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architecture_has_its_weights_beside_the_graph(architecture: str, tmp_path: Path) -> None:
    encoder = tiny_encoder(architecture, dim=48)
    encoder.save(tmp_path / "trained")
    report = export(tmp_path / "trained", tmp_path / "served")
    assert [graph.variant for graph in report.graphs] == list(Variant)
    stored = EncoderSpec.load(tmp_path / "served")
    expected = encoder.encode(CHECK_TEXTS, Side.QUERY)
    for graph in report.graphs:
        path = tmp_path / "served" / graph.variant.filename
        data = path.with_name(path.name + DATA_SUFFIX)
        assert stored.checksums[data.name] == sha256_of(data)
        assert graph.size_bytes == path.stat().st_size + data.stat().st_size
        assert all(node.op_type != "Transpose" or "weight" not in node.input[0] for node in _nodes(path))
        vectors = OnnxEncoder.load(tmp_path / "served", graph.variant).encode(CHECK_TEXTS, Side.QUERY)
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE[graph.variant])
    sizes = {graph.variant: graph.size_bytes for graph in report.graphs}
    assert sizes[Variant.INT8] < sizes[Variant.FP16] < sizes[Variant.FP32]


def _nodes(path: Path) -> list[onnx.NodeProto]:
    return list(onnx.load(path, load_external_data=False).graph.node)


def test_int8_quantises_products_by_block_and_tables_by_row(tmp_path: Path) -> None:
    tiny_encoder("qwen3").save(tmp_path / "trained")
    export(tmp_path / "trained", tmp_path / "served", variants=[Variant.INT8])
    kinds = [node.op_type for node in _nodes(tmp_path / "served" / "model.int8.onnx")]
    assert kinds.count("MatMulNBits") == 2 * 7
    model = onnx.load(tmp_path / "served" / "model.int8.onnx")
    floats = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    assert max(len(tensor.dims) for tensor in floats if "scales" not in tensor.name) == 1  # only norms, no matrix


def test_quantised_blocks_are_near_their_weights_and_padded() -> None:
    weight = np.random.default_rng(0).normal(size=(5, 70)).astype(np.float32)
    blocks, scales = quantise_blocks(weight)
    assert (blocks.shape, blocks.dtype, scales.shape) == ((5, 3, BLOCK), np.uint8, (15,))
    restored = (blocks.astype(np.float32) - ZERO) * scales.reshape(5, 3, 1)
    np.testing.assert_allclose(restored.reshape(5, -1)[:, :70], weight, atol=float(scales.max()) / 2 + 1e-6)
    assert (blocks[:, 2, 70 - 2 * BLOCK :] == ZERO).all()


def test_dense_layers_and_pooling_are_part_of_the_graph(tmp_path: Path) -> None:
    plain = tiny_encoder("bert")
    torch.manual_seed(1)
    projection = Projection(WIDTH, 24, hidden=20, bias=True, tanh=True)
    spec = plain.spec.model_copy(update={"native_dim": 24, "dim": 24, "pooling": Pooling.MEAN})
    encoder = TorchEncoder(plain.backbone, spec, plain.tokenizer_json, projection).eval()
    encoder.save(tmp_path / "trained")
    expected = encoder.encode(CHECK_TEXTS, Side.QUERY)
    export(tmp_path / "trained", tmp_path / "served", variants=[Variant.FP16, Variant.FP32])
    for variant in (Variant.FP32, Variant.FP16):
        vectors = OnnxEncoder.load(tmp_path / "served", variant).encode(CHECK_TEXTS, Side.QUERY)
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE[variant])


def test_other_weights_of_the_same_shape_are_another_encoder(tmp_path: Path) -> None:
    specs = []
    for seed, name in enumerate(("one", "two")):
        encoder = tiny_encoder("bert")
        with torch.no_grad():
            encoder.backbone.encoder.layer[0].output.dense.weight.add_(0.01 * seed)
        encoder.save(tmp_path / f"{name}-trained")
        specs.append(export(tmp_path / f"{name}-trained", tmp_path / name, variants=[Variant.FP16]).spec)
    assert not specs[0].fingerprints & specs[1].fingerprints
    assert not specs[0].identities & specs[1].identities
    assert len(specs[0].identities) == 2  # the graph, and the trained weights that it was made from


def test_a_data_file_that_was_altered_or_is_missing_is_refused(tmp_path: Path) -> None:
    tiny_encoder("bert").save(tmp_path / "trained")
    export(tmp_path / "trained", tmp_path / "served", variants=[Variant.FP32])
    data = tmp_path / "served" / f"model.onnx{DATA_SUFFIX}"
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(BadEncoder, match=r"model\.onnx\.data was altered"):
        OnnxEncoder.load(tmp_path / "served")
    data.unlink()
    with pytest.raises(BadEncoder, match=r"model\.onnx\.data is missing"):
        OnnxEncoder.load(tmp_path / "served")


def test_a_new_export_replaces_the_data_files_of_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_encoder("bert").save(tmp_path / "trained")
    export(tmp_path / "trained", tmp_path / "served", variants=[Variant.FP32])
    monkeypatch.undo()
    export(tmp_path / "trained", tmp_path / "served", variants=[Variant.FP32], backend=Backend.TORCH)
    assert {path.name for path in (tmp_path / "served").iterdir()} == {"encoder.json", "tokenizer.json", "model.onnx"}
