"""The packed pass of every architecture equals transformers, causal or not, with and without windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import AutoConfig, AutoModel

from models.encoder.packed.attention import BACKENDS
from models.encoder.packed.encoder import PackedModel
from models.encoder.packed.kernels import lay_out
from models.encoder.packed.weights import ARCHITECTURES, read_weights
from models.encoder.spec import PACKED, Pooling
from models.encoder.torch import pool

POSITIONS = 128
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100,
    "max_position_embeddings": POSITIONS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
MODERN = {"cls_token_id": 1, "sep_token_id": 2}
# One key head, heads wider than hidden / heads, scores scaled by another number than the head width.
GEMMA = {"num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {}),
    ("roberta", {"pad_token_id": 1}),
    ("xlm-roberta", {"pad_token_id": 1}),
    ("modernbert", MODERN | {"local_attention": 8, "global_attn_every_n_layers": 3}),
    ("modernbert", MODERN | {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    ("gte", {}),
    ("gte", {"type_vocab_size": 0}),
    ("qwen2", GROUPED),
    ("qwen2", GROUPED | {"is_causal": False}),
    ("qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen3", GROUPED | {"head_dim": 16}),
    ("qwen3", GROUPED | {"head_dim": 16, "attention_bias": True, "is_causal": False}),
    ("llama", GROUPED),
    ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    ("llama", GROUPED | {"is_causal": False}),
    ("mistral", GROUPED | {"sliding_window": 5}),
    ("mistral", GROUPED | {"sliding_window": None}),
    ("mistral", GROUPED | {"sliding_window": None, "is_causal": False}),
    ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0}),
    ("gemma3_text", GEMMA | {"layer_types": [LOCAL, GLOBAL] * 2}),
    ("gemma3_text", GEMMA | {"layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL], "use_bidirectional_attention": True}),
    ("gpt_neox", {}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
]


def test_every_architecture_has_a_case() -> None:
    assert {kind for kind, _ in CASES} == set(ARCHITECTURES) == set(PACKED)


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=[f"{kind}-{place}" for place, (kind, _) in enumerate(CASES)])
@torch.no_grad()
def test_vectors_equal_those_of_transformers(kind: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SHAPE | changes)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        # Gemma's norms are initialised to zero, and one is added to them.
        starts_at_one = parameter.ndim == 1 and "norm" in name.lower() and "bias" not in name and "gemma" not in kind
        torch.nn.init.normal_(parameter, float(starts_at_one), 0.3)
    random = np.random.default_rng(0)
    texts = [random.integers(3, 100, length) for length in (3, 17, 30, 1, 64)]
    lengths = np.array([len(text) for text in texts])
    ids = torch.full((len(texts), 64), config.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.from_numpy(text), 1
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = read_weights(model, POSITIONS, torch.device("cpu"))
    batch = lay_out(torch.from_numpy(np.concatenate(texts).astype(np.int32)), lengths)
    for pooling in Pooling:
        found = PackedModel(weights, BACKENDS["padded"], pooling)(batch)
        assert cosine_similarity(found, pool(states, mask, pooling)).min() > 0.99999
