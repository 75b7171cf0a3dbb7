"""Qwen2 and Qwen3 decoders as a function from a packed batch to one hidden state a document.

Takes its weights from transformers' model: query, key and value matrices side by side, gate and up likewise, so that a
layer is four matrix products. The residual stream is in the numbers of the weights. Knows nothing of texts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from models.errors import BadEncoder
from models.packed.attention import Attend, Backend
from models.packed.layout import Packed
from models.packed.linear import Dense, Linear, Scaled
from models.packed.pieces import Heads, Pieces, norm

ARCHITECTURES = ("qwen2", "qwen3")
# Their frequencies do not depend on how long a text is.
ROPES = ("default", "linear", "llama3", "yarn")
# What fp8 may leave as it is: a layer's matrices by name, and the first and the last layer.
MATRICES = ("qkv", "out", "gate_up", "down")
EDGES = "edges"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights; `head_norms` are Qwen3's, of queries and keys."""

    input_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    out: Linear
    output_norm: Tensor
    gate_up: Linear
    down: Linear


class PackedDecoder:
    """The forward pass; its weights are frozen, and on one device."""

    def __init__(
        self, backbone: PreTrainedModel, max_length: int, device: torch.device, attention: Backend, *,
        fp8: bool = False, keep: Collection[str] = (), compiled: bool = False,
    ) -> None:  # fmt: skip
        """Copies the weights to the device. `keep` names what fp8 leaves alone, of MATRICES and EDGES."""
        config = backbone.config
        _require_known(backbone)
        count = len(backbone.layers)
        self.attention = attention
        self._pieces = Pieces(compiled=compiled)
        self._eps = float(config.rms_norm_eps)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._heads = Heads(config.num_attention_heads, config.num_key_value_heads, width)
        self._embedding = backbone.embed_tokens.weight.detach().to(device)
        self._cos, self._sin = _turns(backbone.rotary_emb, max_length, device)
        self._layers = [
            _layer(layer, device, fp8=fp8 and not (EDGES in keep and number in (0, count - 1)), keep=keep)
            for number, layer in enumerate(backbone.layers)
        ]
        self._norm = backbone.norm.weight.detach().to(device)
        self.device = device

    @torch.no_grad()
    def __call__(self, batch: Packed) -> Tensor:
        """The last hidden state (documents, hidden) of each document's last token, normed."""
        hidden = functional.embedding(batch.ids, self._embedding)
        attend = self.attention(batch)
        for layer in self._layers[:-1]:
            hidden = self._run(layer, hidden, batch, attend, None)
        # Of the last layer nothing but the last tokens is read: the others give it keys and values, no more.
        hidden = self._run(self._layers[-1], hidden, batch, attend, batch.last)
        return norm(hidden, self._norm, self._eps)

    def _run(self, layer: Layer, hidden: Tensor, batch: Packed, attend: Attend, rows: Tensor | None) -> Tensor:
        """The residual stream after the layer; only its `rows` if they are given."""
        pieces, eps = self._pieces, self._eps
        joint = layer.qkv(pieces.norm[layer.qkv.quantised](hidden, layer.input_norm, eps))
        turns = (batch.positions, self._cos, self._sin, layer.head_norms, eps, self._heads)
        queries, keys = pieces.rotate(joint, *turns)
        mixed = attend(queries, keys, self._heads.split(joint)[2]).flatten(1)
        if rows is not None:
            mixed, hidden = mixed[rows], hidden[rows]
        layer.out.add_to(hidden, pieces.carry[layer.out.quantised](mixed))
        joint = layer.gate_up(pieces.norm[layer.gate_up.quantised](hidden, layer.output_norm, eps))
        layer.down.add_to(hidden, pieces.gate[layer.down.quantised](joint))
        return hidden


def _require_known(backbone: PreTrainedModel) -> None:
    config = backbone.config
    if config.model_type not in ARCHITECTURES:
        raise BadEncoder(f"{config.model_type} is not encoded without padding; export it (care export)")
    rope = backbone.rotary_emb.rope_type
    if rope not in ROPES:
        raise BadEncoder(f"positions of rope type {rope!r} are not supported, only {', '.join(ROPES)}")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise BadEncoder("sliding-window attention is not supported; set use_sliding_window to false in config.json")
    if config.hidden_act != "silu":
        raise BadEncoder(f"hidden_act {config.hidden_act!r} is not supported, only silu")


def _layer(source: nn.Module, device: torch.device, *, fp8: bool, keep: Collection[str]) -> Layer:
    attention, mlp = source.self_attn, source.mlp
    dense = {
        "qkv": _join(device, attention.q_proj, attention.k_proj, attention.v_proj),
        "out": _join(device, attention.o_proj),
        "gate_up": _join(device, mlp.gate_proj, mlp.up_proj),
        "down": _join(device, mlp.down_proj),
    }
    if dense["out"].bias is not None:
        raise BadEncoder("attention_bias is not supported (config.json); export the encoder (care export)")
    matrices: dict[str, Linear] = {
        name: Scaled.of(matrix) if fp8 and name not in keep else matrix for name, matrix in dense.items()
    }
    norms = [source.input_layernorm, source.post_attention_layernorm]
    if hasattr(attention, "q_norm"):
        norms += [attention.q_norm, attention.k_norm]
    before, after, *of_heads = (one.weight.detach().to(device) for one in norms)
    head_norms = (of_heads[0], of_heads[1]) if of_heads else None
    return Layer(input_norm=before, output_norm=after, head_norms=head_norms, **matrices)


def _join(device: torch.device, *parts: nn.Module) -> Dense:
    weights = [part.weight.detach().to(device) for part in parts]
    biases = [part.bias.detach().to(device) for part in parts if part.bias is not None]
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return Dense(weight, torch.cat(biases) if biases else None)


def _turns(rotary: nn.Module, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine (positions, head width / 2) of every position's angles, in float32."""
    angles = torch.arange(positions, device=device).float()[:, None] * rotary.inv_freq.to(device).float()
    return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
