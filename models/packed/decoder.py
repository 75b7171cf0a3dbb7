"""Qwen2 and Qwen3 decoders as a function from a packed batch to one hidden state a document.

The residual stream is in the numbers of the weights, bf16 or fp32. Knows nothing of texts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.packed.attention import Attend, Backend
from models.packed.layout import Packed
from models.packed.pieces import Pieces, norm
from models.packed.weights import Layer, Weights


class PackedDecoder:
    """The forward pass."""

    def __init__(self, weights: Weights, attention: Backend, *, compiled: bool = False) -> None:
        self._weights = weights
        self._attention = attention
        self._pieces = Pieces(compiled=compiled)

    @torch.no_grad()
    def __call__(self, batch: Packed) -> Tensor:
        """The last hidden state (documents, hidden) of each document's last token, normed."""
        weights = self._weights
        hidden = functional.embedding(batch.ids, weights.embedding)
        attend = self._attention(batch)
        *layers, final = weights.careful if batch.short else weights.layers
        for layer in layers:
            hidden = self._run(layer, hidden, batch, attend, None)
        # Of the last layer nothing but the last tokens is read: the others give it keys and values, no more.
        hidden = self._run(final, hidden, batch, attend, batch.last)
        return norm(hidden, weights.norm, weights.eps)

    def _run(self, layer: Layer, hidden: Tensor, batch: Packed, attend: Attend, rows: Tensor | None) -> Tensor:
        """The residual stream after the layer, in place; only its `rows`, and a copy, if they are given."""
        pieces, weights = self._pieces, self._weights
        joint = layer.qkv(pieces.norm[layer.qkv.quantised](hidden, layer.input_norm, weights.eps))
        turns = (batch.positions, weights.cos, weights.sin, layer.head_norms, layer.biases, weights.eps, weights.heads)
        queries, keys = pieces.rotate(joint, *turns)
        mixed = attend(queries, keys, weights.heads.split(joint)[2]).flatten(1)
        if rows is not None:
            mixed, hidden = mixed[rows], hidden[rows]
        layer.out.add_to(hidden, pieces.carry[layer.out.quantised](mixed))
        joint = layer.gate_up(pieces.norm[layer.gate_up.quantised](hidden, layer.output_norm, weights.eps))
        layer.down.add_to(hidden, pieces.gate[layer.down.quantised](joint))
        return hidden
