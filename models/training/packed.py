"""Reads a step's texts end to end, without padding, with gradients and through transformers' own modules.

transformers takes attention from a table by name. The entry here reads texts that lie one after the other if it is
handed a way to attend to each alone, and is the usual one otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from models.encoder.packed.attention import Attend, Scope, default_backend
from models.encoder.packed.encoder import mean, pooled_rows
from models.encoder.packed.kernels import TILE, Packed
from models.encoder.packed.weights import first_position
from models.encoder.torch import TorchEncoder

NAME = "end_to_end"
MODELS = ("bert", "roberta", "xlm-roberta")
WIDEST = 256


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    attend: Attend | None = None, **options: Any,  # noqa: ANN401 - transformers' own
) -> tuple[Tensor, None]:  # fmt: skip
    if attend is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
        return found
    # Not part[0]: its gradient would be a batch of zeros into which it is copied, a twentieth of a step's time.
    queries, keys, values = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    return attend(queries, keys, values)[None], None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def can_pack(encoder: TorchEncoder) -> bool:
    """Returns whether `read_packed` reads as the encoder does, by kernels for texts end to end.

    They support no dropout in attention, and heads of some widths only.
    """
    config, modules = encoder.backbone.config, encoder.backbone.named_modules()
    if config.model_type not in MODELS:
        return False
    width, positions = config.hidden_size // config.num_attention_heads, config.max_position_embeddings
    # The modules' own: a recipe may have changed them.
    dropped = any(module.p for name, module in modules if name.endswith(".self.dropout"))
    # A batch's filler has up to TILE positions.
    return not dropped and width % 8 == 0 and width <= WIDEST and positions - first_position(config) >= TILE


def read_packed(encoder: TorchEncoder, batch: Packed) -> Tensor:
    """Returns what `TorchEncoder.pooled` does, (texts, native_dim) in float32."""
    backbone = encoder.backbone
    if backbone.config._attn_implementation != NAME:
        backbone.set_attn_implementation(NAME)
    ids = batch.ids[None].long()
    output = backbone(
        input_ids=ids,
        position_ids=batch.positions[None] + first_position(backbone.config),
        token_type_ids=torch.zeros_like(ids),
        attend=default_backend(ids.device)(batch, Scope(right=-1)),
    )
    hidden, rows = output.last_hidden_state.squeeze(0), pooled_rows(batch, encoder.spec.pooling)
    vectors = mean(hidden, batch) if rows is None else hidden[rows]
    return (vectors if encoder.projection is None else encoder.projection(vectors)).float()
