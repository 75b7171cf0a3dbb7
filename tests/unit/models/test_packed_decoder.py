"""The packed pass equals transformers for Qwen2 and Qwen3; fp8 comes close."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, DistilBertConfig, PreTrainedModel

from models.encoder.packed.attention import BACKENDS
from models.encoder.packed.encoder import PackedModel
from models.encoder.packed.kernels import SHORT_TOKENS, TILE, Dense, Scaled, pack, quantise
from models.encoder.packed.weights import Layer, read_weights
from models.errors import BadEncoder
from tests.support.packed import CPU, LENGTHS, POSITIONS, decoder, documents, last_states

ARCHITECTURES = ("qwen2", "qwen3")
LONG = (17, 40, 29, 64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_equal_those_of_transformers(architecture: str) -> None:
    model, batch = decoder(architecture), documents()
    found = PackedModel(read_weights(model, POSITIONS, CPU), BACKENDS["padded"])(pack(batch, CPU))
    torch.testing.assert_close(found, last_states(model, batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_scaled_positions_equal_those_of_transformers(rope: dict[str, object]) -> None:
    model, batch = decoder("qwen3", rope_parameters=rope), documents()
    found = PackedModel(read_weights(model, POSITIONS, CPU), BACKENDS["padded"])(pack(batch, CPU))
    torch.testing.assert_close(found, last_states(model, batch), atol=1e-5, rtol=1e-5)


def test_one_key_head_and_as_many_key_heads_as_query_heads_work() -> None:
    for key_heads in (1, 4):
        model, batch = decoder("qwen2", num_key_value_heads=key_heads), documents()
        found = PackedModel(read_weights(model, POSITIONS, CPU), BACKENDS["padded"])(pack(batch, CPU))
        torch.testing.assert_close(found, last_states(model, batch), atol=1e-5, rtol=1e-5)


def test_a_batch_is_padded_to_whole_tiles() -> None:
    batch = pack(documents(), CPU)
    assert len(batch.ids) % TILE == 0
    assert batch.boundaries.tolist()[: len(LENGTHS) + 1] == [0, 1, 6, 23, 63, 65, 66]
    assert batch.boundaries.tolist()[-1] == len(batch.ids)
    assert batch.last.tolist() == [0, 5, 22, 62, 64, 65]
    assert batch.positions.tolist()[:8] == [0, 0, 1, 2, 3, 4, 0, 1]
    whole = pack(documents((TILE,)), CPU)
    assert (len(whole.ids), whole.boundaries.tolist(), whole.longest) == (TILE, [0, TILE], TILE)


def test_a_short_document_makes_a_batch_short_but_padding_does_not() -> None:
    assert pack(documents((40, SHORT_TOKENS)), CPU).short
    assert not pack(documents((40, SHORT_TOKENS + 1)), CPU).short
    assert not pack(documents((TILE - 1,)), CPU).short


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp8_is_close_to_full_precision(architecture: str) -> None:
    model, batch = decoder(architecture), documents(LONG)
    weights = read_weights(model, POSITIONS, CPU, fp8=True)
    found = PackedModel(weights, BACKENDS["padded"])(pack(batch, CPU))
    distance = float(1 - torch.nn.functional.cosine_similarity(found, last_states(model, batch)).mean())
    assert 1e-5 < distance < 0.02


def test_fp8_takes_weights_in_bf16() -> None:
    model, batch = decoder("qwen2").to(torch.bfloat16), documents()
    weights = read_weights(model, POSITIONS, CPU, fp8=True)
    found = PackedModel(weights, BACKENDS["padded"])(pack(batch, CPU))
    expected = PackedModel(read_weights(model, POSITIONS, CPU), BACKENDS["padded"])(pack(batch, CPU))
    assert found.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(found.float(), expected.float()).mean() > 0.97


def test_large_key_biases_lose_little_precision_in_bf16() -> None:
    model, batch = decoder("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6}), documents()
    with torch.no_grad():
        for layer in model.layers:
            # As in Qwen2: in the pair of each head, half a head apart, that rotates slowest.
            for matrix, size in ((layer.self_attn.q_proj, 40.0), (layer.self_attn.k_proj, 150.0)):
                matrix.bias.view(-1, 2, 8)[:, :, -1] = size
    expected = last_states(model, batch)
    model.to(torch.bfloat16)
    found = PackedModel(read_weights(model, POSITIONS, CPU), BACKENDS["padded"])(pack(batch, CPU))
    assert cosine_similarity(found.float(), expected).min() > 0.99
    # With biases added in the usual way.
    assert cosine_similarity(last_states(model, batch).float(), expected).min() < 0.8


def add_massive_activation(model: PreTrainedModel) -> None:
    """Makes the first layer add a massive activation for inputs on one side of a plane, as attention sinks do."""
    generator = torch.Generator().manual_seed(3)
    mlp = model.layers[0].mlp
    side = torch.randn(mlp.gate_proj.in_features, generator=generator)
    with torch.no_grad():
        mlp.gate_proj.weight[0] = 100 * side
        mlp.up_proj.weight[0] = side
        mlp.down_proj.weight[7, 0] = 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp8_keeps_short_texts_with_massive_activations_close(architecture: str) -> None:
    model, batch = decoder(architecture), documents((1, 2, 3, 4) * 50)
    add_massive_activation(model)
    expected = last_states(model, batch)
    weights = read_weights(model, POSITIONS, CPU, fp8=True)

    def worst(careful: list[Layer]) -> float:
        found = PackedModel(replace(weights, careful=careful), BACKENDS["padded"])(pack(batch, CPU))
        return float(cosine_similarity(found, expected).min())

    assert worst(weights.careful) > 0.98
    assert worst(weights.layers) < 0.8


def test_quantising_keeps_the_scale_of_each_row() -> None:
    values = torch.tensor([[1.0, -448.0, 3.5], [1e-3, 2e-3, -4e-3], [0.0, 0.0, 0.0]])
    quantised, scale = quantise(values)
    torch.testing.assert_close(quantised.float() * scale, values, rtol=0.07, atol=0)
    dense = Dense(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.ones(8))
    exact, near = dense(values[:2]), Scaled.of(dense)(quantise(values[:2]))
    assert (near - exact).norm() / exact.norm() < 0.05


def test_unsupported_architectures_and_options_are_refused() -> None:
    with pytest.raises(BadEncoder, match="not distilbert; make an ONNX graph"):
        read_weights(AutoModel.from_config(DistilBertConfig(n_layers=1, dim=32, n_heads=2, hidden_dim=32)), 48, CPU)
    with pytest.raises(BadEncoder, match="activation 'tanh'"):
        read_weights(decoder("qwen3", hidden_act="tanh"), POSITIONS, CPU)
    rope = {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 2.0}
    with pytest.raises(BadEncoder, match="rope type 'dynamic'"):
        read_weights(decoder("qwen3", rope_parameters=rope), POSITIONS, CPU)
