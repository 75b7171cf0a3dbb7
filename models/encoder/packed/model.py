"""A transformer as a function from a packed batch to one hidden state a document.

The residual stream is in the numbers of the weights, bf16 or fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from models.encoder.packed.kernels import (
    Activation,
    Attend,
    Backend,
    Linear,
    Norm,
    Packed,
    Pieces,
    Scope,
    activation,
    norm,
)
from models.encoder.packed.weights import Layer, Norms, Weights
from models.encoder.spec import Pooling


class PackedModel:
    """The forward pass with pooling."""

    def __init__(
        self, weights: Weights, attention: Backend, pooling: Pooling = Pooling.EOS, *, compiled: bool = False
    ) -> None:
        self._weights = weights
        self._pooling = pooling
        self._attention = attention
        self._pieces = Pieces(activation(weights.activation, gated=weights.gated), compiled=compiled)

    @torch.no_grad()
    def __call__(self, batch: Packed) -> Tensor:
        """The pooled last hidden states (documents, hidden)."""
        weights = self._weights
        hidden = self._embed(batch)
        attends: dict[Scope, Attend] = {}
        *layers, final = weights.careful if batch.short else weights.layers
        for layer in (*layers, final):
            if layer.scope not in attends:
                attends[layer.scope] = self._attention(batch, layer.scope)
        for layer in layers:
            hidden = self._run(layer, hidden, batch, attends[layer.scope], None)
        # CLS and EOS read one token a document: the others give the last layer keys and values, no more.
        rows = {Pooling.EOS: batch.last, Pooling.CLS: batch.boundaries[: len(batch.last)]}.get(self._pooling)
        hidden = self._run(final, hidden, batch, attends[final.scope], rows)
        hidden = hidden if weights.norm is None else norm(hidden, *weights.norm)
        return hidden if rows is not None else _mean(hidden, batch)

    def _embed(self, batch: Packed) -> Tensor:
        table = self._weights.embedding
        hidden = functional.embedding(batch.ids, table.tokens)
        if table.scale != 1.0:
            hidden = hidden * table.scale
        if table.positions is not None:
            hidden = hidden + table.positions[batch.positions]
        if table.types is not None:
            hidden = hidden + table.types
        return hidden if table.norm is None else norm(hidden, *table.norm)

    def _run(self, layer: Layer, hidden: Tensor, batch: Packed, attend: Attend, rows: Tensor | None) -> Tensor:
        """The residual stream after the layer, in place; only its `rows`, and a copy, if they are given."""
        pieces, weights = self._pieces, self._weights
        joint = layer.qkv(self._normed(hidden, layer.attention.before, layer.qkv))
        queries, keys, values = weights.heads.split(joint)
        if layer.rotation is not None:
            turns = (*layer.rotation, layer.head_norms, layer.biases, weights.eps, weights.heads)
            queries, keys = pieces.rotate(joint, batch.positions, *turns)
        mixed = attend(queries, keys, values).flatten(1)
        if rows is not None:
            mixed, hidden = mixed[rows], hidden[rows]
        mixed = pieces.carry[layer.out.quantised](mixed)
        if weights.parallel:
            joint = layer.up(self._normed(hidden, layer.mlp.before, layer.up))
            hidden = self._add(layer.out, mixed, hidden, layer.attention)
        else:
            hidden = self._add(layer.out, mixed, hidden, layer.attention)
            joint = layer.up(self._normed(hidden, layer.mlp.before, layer.up))
        return self._add(layer.down, pieces.activate[layer.down.quantised](joint), hidden, layer.mlp)

    def _normed(self, hidden: Tensor, before: Norm | None, matrix: Linear) -> Activation:
        pieces = self._pieces
        found: Activation = (
            pieces.carry[matrix.quantised](hidden) if before is None else pieces.norm[matrix.quantised](hidden, *before)
        )
        return found

    def _add(self, matrix: Linear, inputs: Activation, hidden: Tensor, norms: Norms) -> Tensor:
        if norms.branch is None:
            matrix.add_to(hidden, inputs)
        else:
            hidden += self._pieces.norm[False](matrix(inputs), *norms.branch)
        return hidden if norms.after is None else self._pieces.norm[False](hidden, *norms.after)


def _mean(hidden: Tensor, batch: Packed) -> Tensor:
    """The mean hidden state of each document in float32; a running sum would lose digits over a long batch."""
    documents = len(batch.last)
    lengths = batch.boundaries.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=hidden.device), lengths)
    total = hidden.new_zeros((len(lengths), hidden.shape[1]), dtype=torch.float32)
    total.index_add_(0, owner, hidden.float())
    return total[:documents] / lengths[:documents, None]
