"""An LLM's encoder folder in the indexer: the torch encoder's vectors, whatever the budget or the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from models.encoder.packed import encoder as packed_encoder
from models.encoder.packed.attention import BACKENDS
from models.encoder.packed.encoder import CHUNK_TEXTS, Item, PackedEncoder, PackedModel, batches, tokenised
from models.encoder.packed.kernels import SHORT_TOKENS, Packed
from models.encoder.packed.weights import Weights, read_weights
from models.encoder.spec import POOLINGS, EncoderSpec, Pooling, Precision, Side, sha256_of
from models.encoder.tokenizer import Tokens
from models.encoder.torch import Projection, TorchEncoder, weight_files
from models.errors import BadEncoder, OutOfDeviceMemory
from models.export.parity import CHECK_TEXTS
from tests.support.packed import CPU
from tests.support.tiny_models import MAX_LENGTH, tiny_encoder

TEXTS = [*CHECK_TEXTS[:24], "", "a"]
DIM = 24


class Forward:
    """A packed pass that runs out of memory if a batch has more than `most` tokens."""

    def __init__(self, encoder: TorchEncoder, most: int | None = None) -> None:
        weights = read_weights(encoder.backbone, MAX_LENGTH, CPU)
        self._pass = PackedModel(weights, BACKENDS["padded"])
        self._most = most
        self.sizes: list[int] = []

    def __call__(self, batch: Packed) -> torch.Tensor:
        tokens = int(batch.last[-1]) + 1
        if self._most is not None and tokens > self._most:
            raise torch.OutOfMemoryError(f"{tokens} tokens")
        self.sizes.append(tokens)
        return self._pass(batch)


def packed(encoder: TorchEncoder, forward: Forward, budget: int) -> PackedEncoder:
    return PackedEncoder(encoder.spec, Precision.FP32, encoder.tokenizer, (), forward, CPU, budget)


@pytest.mark.parametrize("budget", [1, 100, 4096])
def test_vectors_are_those_of_the_torch_encoder_whatever_the_budget(budget: int) -> None:
    encoder = tiny_encoder("qwen3", dim=DIM)
    forward = Forward(encoder)
    found = packed(encoder, forward, budget).encode(TEXTS, Side.DOCUMENT)
    np.testing.assert_allclose(found, encoder.encode(TEXTS, Side.DOCUMENT), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert max(forward.sizes) <= max(budget, MAX_LENGTH)
    assert len(forward.sizes) == (2 if budget == 4096 else len(TEXTS) if budget == 1 else len(forward.sizes))


def test_out_of_memory_halves_the_budget_permanently_and_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = tiny_encoder("qwen3", dim=DIM)
    forward = Forward(encoder, most=130)
    ours = packed(encoder, forward, 400)
    texts = TEXTS * 2
    np.testing.assert_allclose(
        ours.encode(texts, Side.DOCUMENT), encoder.encode(texts, Side.DOCUMENT), atol=1e-5
    )  # fmt: skip
    assert ours.token_budget <= 130
    errors = capsys.readouterr().err
    assert errors.count("out of memory") >= 1
    ours.encode(texts, Side.DOCUMENT)
    assert capsys.readouterr().err == ""
    assert max(forward.sizes) <= 130


def test_a_text_too_large_for_memory_gives_an_error_with_the_remedy() -> None:
    encoder = tiny_encoder("qwen3")
    with pytest.raises(OutOfDeviceMemory, match=r"one text of .* tokens; use a larger GPU"):
        packed(encoder, Forward(encoder, most=0), 400).encode(TEXTS, Side.DOCUMENT)


def test_weights_too_large_for_memory_give_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: object, **__: object) -> Weights:
        raise torch.OutOfMemoryError

    tiny_encoder("qwen3").save(tmp_path)
    monkeypatch.setattr(packed_encoder, "read_weights", too_much)
    with pytest.raises(OutOfDeviceMemory, match=r"the weights of .* in fp32; free it or use a larger one"):
        PackedEncoder.load(tmp_path, device="cpu")


def test_no_texts_give_no_vectors() -> None:
    encoder = tiny_encoder("qwen3", dim=DIM)
    assert packed(encoder, Forward(encoder), 400).encode([], Side.DOCUMENT).shape == (0, DIM)


def test_each_side_uses_its_instruction() -> None:
    encoder = tiny_encoder("qwen3")
    encoder.spec = encoder.spec.model_copy(update={"document_instruction": "文档："})
    found = packed(encoder, Forward(encoder), 400)
    np.testing.assert_allclose(
        found.encode(["发热"], Side.DOCUMENT), found.encode(["文档：发热"], Side.QUERY), atol=1e-6
    )  # fmt: skip


def test_texts_are_encoded_longest_first_in_chunks() -> None:
    encoder = tiny_encoder("qwen3")
    texts = ["长" * (row % 7) for row in range(2 * CHUNK_TEXTS + 3)]
    items = list(tokenised(texts, encoder.tokenizer))
    assert sorted(item.row for item in items) == list(range(len(texts)))
    lengths = [len(texts[item.row]) for item in items]
    assert lengths == sorted(lengths, reverse=True)
    assert all(item.tokens == encoder.tokenizer(texts[item.row]) for item in items[:: CHUNK_TEXTS // 4])


def test_a_batch_is_limited_by_the_current_budget() -> None:
    budgets = iter([10, 10, 10, 4, 4, 4, 4])
    items = [Item(row, Tokens([1] * size, False)) for row, size in enumerate((5, 5, 1, 3, 6, 1))]
    found = [[item.row for item in batch] for batch in batches(items, lambda: next(budgets))]
    assert found == [[0, 1], [2, 3], [4], [5]]


def test_short_texts_are_encoded_in_separate_batches() -> None:
    sizes = (60, SHORT_TOKENS + 1, SHORT_TOKENS, 30, 3, 80, 2)
    items = [Item(row, Tokens([1] * size, False)) for row, size in enumerate(sizes)]
    assert [[item.row for item in batch] for batch in batches(items, lambda: 110)] == [[0, 1, 3], [5], [2, 4, 6]]


def test_a_folder_is_opened_and_verified_and_its_fingerprint_has_the_precision(tmp_path: Path) -> None:
    encoder = tiny_encoder("qwen3", dim=DIM)
    encoder.save(tmp_path)
    plain = PackedEncoder.load(tmp_path, device="cpu")
    assert (plain.variant, plain.spec.dim) == (Precision.FP32, DIM)
    expected = encoder.encode(TEXTS, Side.DOCUMENT)
    np.testing.assert_allclose(plain.encode(TEXTS, Side.DOCUMENT), expected, atol=1e-5)
    others = [PackedEncoder.load(tmp_path, device="cpu", precision=one) for one in (Precision.BF16, Precision.FP8)]
    for other in others:
        cosines = (other.encode(TEXTS, Side.DOCUMENT) * expected).sum(axis=1)
        assert cosines.mean() > 0.95
    assert len({plain.fingerprint, *(other.fingerprint for other in others)}) == 3
    (tmp_path / "model.safetensors").write_bytes(b"altered")
    with pytest.raises(BadEncoder, match="altered"):
        PackedEncoder.load(tmp_path, device="cpu")


@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("tanh", [None, False, True])
def test_any_pooling_and_a_dense_layer_give_the_vectors_of_torch(
    architecture: str, pooling: Pooling, tanh: bool | None, tmp_path: Path
) -> None:
    plain = tiny_encoder(architecture, pooling)
    dim = plain.spec.native_dim
    on_top = None if tanh is None else Projection(dim, dim, bias=True, tanh=tanh)
    whole = TorchEncoder(plain.backbone, plain.spec, plain.tokenizer_json, on_top)
    whole.save(tmp_path)
    found = PackedEncoder.load(tmp_path, device="cpu").encode(TEXTS, Side.QUERY)
    np.testing.assert_allclose(found, whole.encode(TEXTS, Side.QUERY), atol=1e-5)


def test_a_change_of_the_computation_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tiny_encoder("qwen3")
    before = packed(encoder, Forward(encoder), 100).fingerprint
    monkeypatch.setattr(packed_encoder, "COMPUTATION", packed_encoder.COMPUTATION + 1)
    assert packed(encoder, Forward(encoder), 100).fingerprint != before


def test_fp8_on_a_gpu_without_it_is_refused_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BadEncoder, match=r"A100 has compute capability 8\.0, fp8 needs 8\.9; use bf16"):
        PackedEncoder.load(tmp_path / "nothing there", device="cuda", precision=Precision.FP8)
    packed_encoder.require_fp8("L40", (8, 9))
    packed_encoder.require_fp8("H200", (9, 0))


def test_an_adapter_is_merged_and_counts_in_the_fingerprint(tmp_path: Path) -> None:
    encoder = tiny_encoder("qwen3", dim=DIM)
    encoder.save(tmp_path)
    bare = PackedEncoder.load(tmp_path, device="cpu")
    adapted = _adapter(tmp_path)
    with pytest.raises(BadEncoder, match="no checksum for adapter/adapter_config"):
        PackedEncoder.load(tmp_path, device="cpu")
    spec = EncoderSpec.load(tmp_path)
    checksums = {name: sha256_of(tmp_path / name) for name in ("tokenizer.json", *weight_files(tmp_path))}
    spec.model_copy(update={"checksums": checksums}).save(tmp_path)
    merged = PackedEncoder.load(tmp_path, device="cpu")
    expected = TorchEncoder(adapted, encoder.spec, encoder.tokenizer_json).eval().encode(TEXTS, Side.DOCUMENT)
    np.testing.assert_allclose(merged.encode(TEXTS, Side.DOCUMENT), expected, atol=1e-5)
    assert np.abs(expected - bare.encode(TEXTS, Side.DOCUMENT)).max() > 0.01
    assert merged.fingerprint != bare.fingerprint
    with pytest.raises(BadEncoder, match="holds an adapter"):
        encoder.save(tmp_path)


def _adapter(folder: Path) -> PeftModel:
    """Writes a LoRA adapter into the folder; returns the folder's backbone with the adapter, not merged."""
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(TorchEncoder.load(folder).backbone, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # initialised to zero
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder / "adapter")
    return adapted
