"""The torch encoder: pooling against a naive loop, order of truncation and norm, padding, folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

from models.encoder.folder import infer_spec
from models.encoder.spec import POOLINGS, EncoderSpec, Pooling, Side, sha256_of
from models.encoder.tokenizer import pad
from models.encoder.torch import TorchEncoder, embed, pool
from models.errors import BadEncoder
from models.export.parity import CHECK_TEXTS
from tests.support.tiny_models import ARCHITECTURES, tiny_encoder, tiny_spec, tiny_tokenizer, write_checkpoint

TEXTS = CHECK_TEXTS[:24]


def naive_pool(hidden: np.ndarray, mask: np.ndarray, pooling: Pooling) -> np.ndarray:
    rows = []
    for states, kept in zip(hidden, mask, strict=True):
        real = [state for state, keep in zip(states, kept, strict=True) if keep]
        rows.append({Pooling.CLS: states[0], Pooling.EOS: real[-1], Pooling.MEAN: sum(real) / len(real)}[pooling])
    return np.stack(rows)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_pooling_equals_a_naive_loop(pooling: Pooling, side: str) -> None:
    hidden = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([1, 3, 7, 6, 2])
    places = torch.arange(7)
    mask = (places < lengths[:, None] if side == "right" else places >= 7 - lengths[:, None]).long()
    expected = naive_pool(hidden.numpy(), mask.numpy(), pooling)
    np.testing.assert_allclose(pool(hidden, mask, pooling).numpy(), expected, atol=1e-6)


def test_truncation_comes_before_the_norm() -> None:
    hidden = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(2))
    vectors = embed(hidden, torch.ones(3, 2, dtype=torch.long), tiny_spec("bert", Pooling.CLS, dim=8))
    cut = hidden[:, 0, :8]
    torch.testing.assert_close(vectors, cut / cut.norm(dim=1, keepdim=True))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))


def test_without_normalisation_the_truncated_states_are_returned() -> None:
    hidden = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(3))
    spec = tiny_spec("bert", Pooling.CLS, dim=8).model_copy(update={"normalize": False})
    torch.testing.assert_close(embed(hidden, torch.ones(3, 2, dtype=torch.long), spec), hidden[:, 0, :8])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_embedding_does_not_depend_on_the_batch(architecture: str) -> None:
    encoder = tiny_encoder(architecture)
    together = encoder.encode(TEXTS, Side.QUERY, batch_size=10)
    alone = np.concatenate([encoder.encode([text], Side.QUERY) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(alone, axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("model_type", ["gemma", "gpt_neox", "phi"])
def test_a_loaded_decoder_gives_the_same_vector_alone_and_in_a_batch(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        model_type, vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    spec = infer_spec(tmp_path, space="s", pooling=Pooling.MEAN, max_length=32)
    encoder = TorchEncoder.load(tmp_path, spec)
    alone = np.vstack([encoder.encode([text], Side.QUERY) for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS, Side.QUERY), alone, atol=1e-5)


def test_a_decoder_padded_on_the_left_gives_the_same_vectors() -> None:
    encoder = tiny_encoder("qwen3")
    tokens = [encoder.tokenizer(text).ids for text in TEXTS[:6]]
    longest = max(map(len, tokens))
    ids = torch.tensor([[0] * (longest - len(t)) + t for t in tokens])
    mask = torch.tensor([[0] * (longest - len(t)) + [1] * len(t) for t in tokens])
    with torch.no_grad():
        left = encoder(ids, mask).numpy()
    np.testing.assert_allclose(left, encoder.encode(TEXTS[:6], Side.QUERY), atol=2e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stating_that_padding_is_on_the_right_does_not_change_vectors(architecture: str) -> None:
    encoder = tiny_encoder(architecture)
    ids, mask = map(torch.from_numpy, pad(encoder.tokenizer.batch(TEXTS[:6])))
    assert not mask.all()
    with torch.no_grad():
        stated, unstated = encoder.pooled(ids, mask, padded_right=True), encoder.pooled(ids, mask)
    np.testing.assert_allclose(stated.numpy(), unstated.numpy(), atol=2e-6)


def test_each_side_reads_its_instruction() -> None:
    plain = tiny_encoder("bert")
    spec = plain.spec.model_copy(update={"query_instruction": "问："})
    instructed = TorchEncoder(plain.backbone, spec, plain.tokenizer_json)
    np.testing.assert_allclose(
        instructed.encode(["感冒"], Side.QUERY), plain.encode(["问：感冒"], Side.QUERY), atol=1e-6
    )
    np.testing.assert_allclose(
        instructed.encode(["感冒"], Side.DOCUMENT), plain.encode(["感冒"], Side.QUERY), atol=1e-6
    )


def test_gradients_reach_the_backbone() -> None:
    encoder = tiny_encoder("bert").train()
    encoder(torch.tensor([[2, 9, 3]]), torch.ones(1, 3, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_encoder_gives_the_same_vectors(architecture: str, tmp_path: Path) -> None:
    encoder = tiny_encoder(architecture, dim=16)
    encoder.save(tmp_path)
    again = TorchEncoder.load(tmp_path)
    assert not again.training
    np.testing.assert_array_equal(again.encode(TEXTS, Side.QUERY), encoder.encode(TEXTS, Side.QUERY))
    stored = EncoderSpec.load(tmp_path)
    assert set(stored.checksums) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert stored.model_copy(update={"checksums": {}}) == encoder.spec


def test_an_altered_weight_file_is_refused(tmp_path: Path) -> None:
    tiny_encoder("bert").save(tmp_path)
    tiny_encoder("bert", seed=1).backbone.save_pretrained(tmp_path)
    with pytest.raises(BadEncoder, match="altered"):
        TorchEncoder.load(tmp_path)


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_an_encoder_folder_is_loaded_strictly(change: str, tmp_path: Path) -> None:
    tiny_encoder("bert").save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del weights["encoder.layer.1.output.dense.weight"]
    else:
        weights["encoder.layer.7.output.dense.weight"] = torch.zeros(2, 2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    spec = EncoderSpec.load(tmp_path)
    checksums = {**spec.checksums, "model.safetensors": sha256_of(tmp_path / "model.safetensors")}
    spec.model_copy(update={"checksums": checksums}).save(tmp_path)
    with pytest.raises(BadEncoder, match="1 weights do not fit"):
        TorchEncoder.load(tmp_path)


def test_a_transformers_folder_needs_a_spec_and_may_have_other_heads(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "pooler.dense.weight": torch.zeros(64, 64)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(BadEncoder, match=r"encoder\.json"):
        TorchEncoder.load(tmp_path)
    loaded = TorchEncoder.load(tmp_path, tiny_spec("bert"))
    np.testing.assert_array_equal(loaded.encode(TEXTS, Side.QUERY), tiny_encoder("bert").encode(TEXTS, Side.QUERY))


def test_a_bin_checkpoint_is_read_as_weights_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    loaded = TorchEncoder.load(tmp_path, tiny_spec("bert"))
    np.testing.assert_array_equal(loaded.encode(TEXTS, Side.QUERY), tiny_encoder("bert").encode(TEXTS, Side.QUERY))
    torch.save({"weights": weights, "code": Path}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadEncoder, match="more than weights"):
        TorchEncoder.load(tmp_path, tiny_spec("bert"))


def test_weights_that_are_damaged_or_of_another_configuration_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:5000])
    with pytest.raises(BadEncoder, match="damaged or not those of config"):
        TorchEncoder.load(tmp_path, tiny_spec("bert"))
    weights.write_bytes(whole)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 32}))
    with pytest.raises(BadEncoder, match="damaged or not those of config"):
        TorchEncoder.load(tmp_path, tiny_spec("bert"))


def test_a_spec_of_another_width_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    wider = tiny_spec("bert").model_copy(update={"native_dim": 128})
    with pytest.raises(BadEncoder, match="the vectors have 64 dimensions"):
        TorchEncoder.load(tmp_path, wider)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadEncoder, match="no weights"):
        TorchEncoder.load(tmp_path, tiny_spec("bert"))


def test_the_configuration_is_plain_json(tmp_path: Path) -> None:
    tiny_encoder("gte").save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gte"
