"""Tiny decoders with random weights, including norms and biases, and token texts for them."""

from __future__ import annotations

import torch
from transformers import AutoModel, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from models.encoder.tokenizer import Tokens

VOCABULARY = 101
POSITIONS = 64
LENGTHS = (1, 5, 17, 40, 2, 1)
CPU = torch.device("cpu")


def decoder_config(architecture: str, **changes: object) -> PretrainedConfig:
    """Two query heads share a key head; Qwen3's heads are wider than hidden / heads."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.15,
        "rope_parameters": {"rope_type": "default", "rope_theta": 200.0},
        "use_cache": False,
        "eos_token_id": 3,
        "pad_token_id": 0,
    }
    if architecture == "qwen3":
        return Qwen3Config(**shape | {"head_dim": 24} | changes)
    return Qwen2Config(**shape | changes)


def decoder(architecture: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(5)
    model = AutoModel.from_config(decoder_config(architecture, **changes)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases, which are initialised to ones and zeros
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[Tokens]:
    generator = torch.Generator().manual_seed(9)
    return [Tokens(torch.randint(4, VOCABULARY, (length,), generator=generator).tolist(), False) for length in lengths]


@torch.no_grad()
def last_states(model: PreTrainedModel, batch: list[Tokens]) -> torch.Tensor:
    """Returns what transformers gives for the last tokens, in one padded batch."""
    longest = max(map(len, batch))
    ids = torch.tensor([tokens.ids + [0] * (longest - len(tokens)) for tokens in batch])
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in batch])
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return torch.stack([hidden[row, len(tokens) - 1] for row, tokens in enumerate(batch)])
