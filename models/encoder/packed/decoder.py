"""Qwen2 and Qwen3 decoders without padding: weights of transformers' models, and the forward pass over a batch.

Query, key and value matrices are joined, gate and up likewise, so that a layer is four products. Configurations that
the pass does not compute are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from models.encoder.packed.kernels import (
    TILE,
    Attend,
    Backend,
    Biases,
    Dense,
    Heads,
    Linear,
    Packed,
    Pieces,
    Scaled,
    norm,
)
from models.errors import BadEncoder

ARCHITECTURES = ("qwen2", "qwen3")
# Counts the changes of the pass that changed vectors. It is part of an encoder's fingerprint, so that older vectors
# are not reused after a change. 2: key biases in float32; the first layers never in fp8 for short texts.
COMPUTATION = 2
# Their frequencies do not depend on how long a text is.
ROPES = ("default", "linear", "llama3", "yarn")
# A layer's matrices, and what they are joined of.
MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# The first and the last layer, where it is said what fp8 leaves alone.
EDGES = "edges"
# Massive activations, which fp8 may tip over in a short text, arise in the first of so many parts of the layers: in the
# third of Qwen2.5-Coder-0.5B's 24 and, as is said, in the seventh of Qwen3's 36.
CAREFUL = 4


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; `head_norms` are Qwen3's, of queries and keys, `biases` Qwen2's."""

    input_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    biases: Biases | None
    out: Linear
    output_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, on one device. `cos` and `sin` (positions, head width / 2) are float32."""

    heads: Heads
    eps: float
    embedding: Tensor
    cos: Tensor
    sin: Tensor
    layers: list[Layer]
    careful: list[Layer]
    """the same for batches with short texts: the first of them never in fp8"""
    norm: Tensor


def read_weights(
    backbone: PreTrainedModel, positions: int, device: torch.device, *, fp8: bool = False, keep: Collection[str] = ()
) -> Weights:
    """Copies the weights to the device. `keep` names what fp8 leaves alone: matrices of MATRICES, and EDGES."""
    config, rotary = backbone.config, _rotary(backbone)
    _require_known(config)
    state = backbone.state_dict()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, width)
    positions = max(positions, TILE)  # of a batch's filler too
    angles = torch.arange(positions, device=device).float()[:, None] * rotary.inv_freq.to(device).float()
    cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    count = config.num_hidden_layers
    edges = {0, count - 1} if EDGES in keep else set()
    layers, careful = [], []
    for number in range(count):
        dense = _layer(_Part(state, f"layers.{number}.", device), heads, (cos, sin))
        names = [name for name in MATRICES if fp8 and name not in keep and number not in edges]
        narrow: dict[str, Any] = {name: Scaled.of(getattr(dense, name)) for name in names}
        layers.append(replace(dense, **narrow))
        careful.append(dense if number * CAREFUL < count else layers[-1])
    whole = _Part(state, "", device)
    return Weights(
        heads=heads,
        eps=float(config.rms_norm_eps),
        embedding=whole["embed_tokens.weight"],
        cos=cos,
        sin=sin,
        layers=layers,
        careful=careful,
        norm=whole["norm.weight"],
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a model's weights, by the rest of their names, on the device."""

    state: Mapping[str, Tensor]
    prefix: str
    device: torch.device

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.state

    def __getitem__(self, name: str) -> Tensor:
        return self.state[self.prefix + name].to(self.device)

    def joined(self, names: tuple[str, ...], kind: str) -> Tensor | None:
        parts = [self[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in self]
        if len(parts) < 2:
            return parts[0] if parts else None
        return torch.cat(parts)


def _layer(own: _Part, heads: Heads, turns: tuple[Tensor, Tensor]) -> Layer:
    """The layer in the encoder's own numbers; `turns` are all positions' cosines and sines."""
    matrices: dict[str, Dense] = {}
    biases = None
    for name, parts in MATRICES.items():
        weight, bias = own.joined(parts, "weight"), own.joined(parts, "bias")
        assert weight is not None
        if name == "qkv" and bias is not None:
            queries, keys, _ = heads.split(bias[None])
            biases = Biases.of(queries[0], keys[0], *turns)
            # The product adds those of values alone.
            queries.zero_()
            keys.zero_()
        matrices[name] = Dense(weight, bias)
    if matrices["out"].bias is not None:
        raise BadEncoder("attention_bias is not supported (config.json); export the encoder (care export)")
    normed = "self_attn.q_norm.weight" in own
    return Layer(
        input_norm=own["input_layernorm.weight"],
        head_norms=(own["self_attn.q_norm.weight"], own["self_attn.k_norm.weight"]) if normed else None,
        biases=biases,
        output_norm=own["post_attention_layernorm.weight"],
        **matrices,
    )


def _rotary(backbone: PreTrainedModel) -> Any:  # noqa: ANN401 - a class of its own in each architecture
    return getattr(backbone, "rotary_emb", None)


def _require_known(config: PretrainedConfig) -> None:
    if config.model_type not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise BadEncoder(f"torch encodes {known} here, not {config.model_type}; make an ONNX graph (care export)")
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPES:
        known = ", ".join(ROPES)
        raise BadEncoder(f"rope type {rope!r} is not supported, only {known}; make an ONNX graph (care export)")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise BadEncoder("sliding-window attention is not supported; make an ONNX graph (care export)")
    if config.hidden_act != "silu":
        raise BadEncoder(f"hidden_act {config.hidden_act!r} is not supported, only silu; export it (care export)")


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
