"""Loads weights of transformers models for the packed forward pass, by one table of names per architecture.

Query, key and value matrices are joined, gate and up likewise, so that a layer is four products. Anything that the pass
does not compute is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from models.encoder.folder import looks_back_only
from models.encoder.packed.attention import Scope
from models.encoder.packed.kernels import ACTIVATIONS, TILE, Biases, Dense, Heads, Linear, Norm, Scaled
from models.errors import BadEncoder

# Counts the changes of the pass that changed vectors. It is part of an encoder's fingerprint, so that older vectors
# are not reused after a change. 2: key biases in float32; the first layers never in fp8 for short texts.
COMPUTATION = 2
# Their frequencies do not depend on how long a text is.
ROPES = ("default", "linear", "llama3", "yarn")
MATRICES = ("qkv", "out", "up", "down")
# Massive activations, which fp8 may tip over in a short text, arise in the first quarter of the layers: in the third of
# Qwen2.5-Coder-0.5B's 24 and, as is reported, in the seventh of Qwen3's 36.
CAREFUL = 4


@dataclass(frozen=True)
class Architecture:
    """How transformers names the weights of one kind of model, and what the names do not say."""

    embedding: str = "embed_tokens"
    embedding_norm: str | None = None
    layer: str = "layers.{}."
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    # The norms of the two halves of a layer: of what goes in, of what the half adds, of the sum.
    attention_norms: tuple[str | None, str | None, str | None] = ("input_layernorm", None, None)
    mlp_norms: tuple[str | None, str | None, str | None] = ("post_attention_layernorm", None, None)
    final_norm: str | None = "norm"
    layer_norm: bool = False
    gated: bool = True
    # Gemma: norms multiply by 1 + weight, and embeddings by the square root of their width.
    gemma: bool = False


_BERT = Architecture(
    embedding="embeddings.word_embeddings", embedding_norm="embeddings.LayerNorm", layer="encoder.layer.{}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"), out="attention.output.dense",
    up=("intermediate.dense",), down="output.dense", attention_norms=(None, None, "attention.output.LayerNorm"),
    mlp_norms=(None, None, "output.LayerNorm"), final_norm=None, layer_norm=True, gated=False,
)  # fmt: skip
_LLAMA = Architecture()
_GEMMA = Architecture(
    attention_norms=("input_layernorm", "post_attention_layernorm", None),
    mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm", None), gemma=True,
)  # fmt: skip
ARCHITECTURES = {
    "bert": _BERT,
    "xlm-roberta": _BERT,
    "roberta": _BERT,
    "modernbert": Architecture(
        embedding="embeddings.tok_embeddings", embedding_norm="embeddings.norm", qkv=("attn.Wqkv",), out="attn.Wo",
        up=("mlp.Wi",), down="mlp.Wo", attention_norms=("attn_norm", None, None), mlp_norms=("mlp_norm", None, None),
        final_norm="final_norm", layer_norm=True,
    ),
    "gte": Architecture(
        embedding="embeddings.word_embeddings", embedding_norm="embeddings.LayerNorm",
        attention_norms=(None, None, "post_attention_layernorm"), mlp_norms=(None, None, "post_mlp_layernorm"),
        final_norm=None, layer_norm=True,
    ),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_neox": Architecture(
        embedding="embed_in", qkv=("attention.query_key_value",), out="attention.dense", up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h", final_norm="final_layer_norm", layer_norm=True, gated=False,
    ),
}  # fmt: skip


class Norms(NamedTuple):
    """The norms of half a layer: of its input, of what it adds to the residual stream, of the sum."""

    before: Norm | None
    branch: Norm | None
    after: Norm | None


class Rotation(NamedTuple):
    """Cosines and sines (positions, rotated width / 2) in float32."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    scope: Scope
    rotation: Rotation | None
    head_norms: tuple[Tensor, Tensor] | None
    biases: Biases | None
    attention: Norms
    mlp: Norms
    qkv: Linear
    out: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Embedding:
    """What a token's first hidden state is the sum of."""

    tokens: Tensor
    scale: float
    positions: Tensor | None
    types: Tensor | None
    norm: Norm | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights, on one device."""

    heads: Heads
    eps: float
    activation: str
    gated: bool
    parallel: bool
    """attention and MLP read the same input (GPT-NeoX)"""
    embedding: Embedding
    layers: list[Layer]
    careful: list[Layer] = field(repr=False)
    """the same for batches with short texts: the first of them never in fp8"""
    norm: Norm | None


def read_weights(backbone: PreTrainedModel, positions: int, device: torch.device, *, fp8: bool = False) -> Weights:
    """Copies the weights to the device."""
    config = backbone.config
    architecture = _known(config)
    eps = next(
        float(getattr(config, name)) for name in ("rms_norm_eps", "layer_norm_eps", "norm_eps") if hasattr(config, name)
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = Heads(
        config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads, width
    )
    reader = _Reader(backbone.state_dict(), "", device, architecture, eps)
    positions = max(positions, TILE)  # of a batch's filler too
    count = config.num_hidden_layers
    rotations: dict[str | None, Rotation | None] = {}
    layers, careful = [], []
    for number in range(count):
        kind = _layer_type(config, number)
        if kind not in rotations:
            rotations[kind] = _rotation(backbone, kind, positions, device)
        own = replace(reader, prefix=architecture.layer.format(number))
        dense = _layer(own, config, heads, kind, rotations[kind])
        narrow: dict[str, Any] = {name: Scaled.of(getattr(dense, name)) for name in MATRICES if fp8}
        layers.append(replace(dense, **narrow))
        careful.append(dense if number * CAREFUL < count else layers[-1])
    return Weights(
        heads=heads,
        eps=eps,
        activation=_activation(config),
        gated=architecture.gated,
        parallel=bool(getattr(config, "use_parallel_residual", False)),
        embedding=_embedding(reader, config),
        layers=layers,
        careful=careful,
        norm=reader.norm(architecture.final_norm),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """A part of a model's weights, by the rest of their names, on the device."""

    state: Mapping[str, Tensor]
    prefix: str
    device: torch.device
    architecture: Architecture
    eps: float

    def get(self, name: str) -> Tensor | None:
        found = self.state.get(self.prefix + name)
        return None if found is None else found.to(self.device)

    def __getitem__(self, name: str) -> Tensor:
        return self.state[self.prefix + name].to(self.device)

    def joined(self, names: tuple[str, ...], kind: str) -> Tensor | None:
        parts = [part for name in names if (part := self.get(f"{name}.{kind}")) is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return torch.cat(parts)

    def norm(self, name: str | None) -> Norm | None:
        weight = None if name is None else self.get(f"{name}.weight")
        if weight is None:
            return None
        weight = weight.float() + 1.0 if self.architecture.gemma else weight
        return Norm(weight, self.get(f"{name}.bias"), self.eps, self.architecture.layer_norm)

    def norms(self, names: tuple[str | None, str | None, str | None]) -> Norms:
        before, branch, after = (self.norm(name) for name in names)
        return Norms(before, branch, after)


def _embedding(reader: _Reader, config: PretrainedConfig) -> Embedding:
    positions = reader.get("embeddings.position_embeddings.weight")
    if positions is not None:
        positions = positions[first_position(config) :]
        if len(positions) < TILE:
            positions = functional.pad(positions, (0, 0, 0, TILE - len(positions)))  # for a batch's filler
    types = reader.get("embeddings.token_type_embeddings.weight")
    tokens = reader[f"{reader.architecture.embedding}.weight"]
    # Rounded as transformers rounds it.
    scale = float(torch.tensor(config.hidden_size**0.5).to(tokens.dtype)) if reader.architecture.gemma else 1.0
    norm = reader.norm(reader.architecture.embedding_norm)
    return Embedding(tokens, scale, positions, None if types is None else types[0], norm)


def first_position(config: PretrainedConfig) -> int:
    """Returns where a table of positions begins: RoBERTa's after the padding id."""
    return 0 if config.model_type == "bert" else int(config.pad_token_id) + 1


def _layer(own: _Reader, config: PretrainedConfig, heads: Heads, kind: str | None, rotation: Rotation | None) -> Layer:
    """Returns the layer in the encoder's own numbers."""
    architecture = own.architecture
    names = {"qkv": architecture.qkv, "out": (architecture.out,), "up": architecture.up, "down": (architecture.down,)}
    query_norm, key_norm = own.norm("self_attn.q_norm"), own.norm("self_attn.k_norm")
    matrices: dict[str, Dense] = {}
    biases = None
    for name, parts in names.items():
        weight, bias = own.joined(parts, "weight"), own.joined(parts, "bias")
        assert weight is not None
        if name == "qkv" and config.model_type == "gpt_neox":
            weight, bias = _regrouped(weight, heads), None if bias is None else _regrouped(bias, heads)
        # Head norms read the sum of product and bias, and a rotation of part of a head has no use for the mean.
        apart = query_norm is None and rotation is not None and 2 * rotation.cos.shape[1] == heads.width
        if name == "qkv" and bias is not None and apart:
            assert rotation is not None
            queries, keys, _ = heads.split(bias[None])
            biases = Biases.of(queries[0], keys[0], *rotation)
            # The product adds those of values alone.
            queries.zero_()
            keys.zero_()
        matrices[name] = Dense(weight, bias)
    return Layer(
        scope=_scope(config, heads, kind),
        rotation=rotation,
        head_norms=(query_norm.weight, key_norm.weight) if query_norm and key_norm else None,
        biases=biases,
        attention=own.norms(architecture.attention_norms),
        mlp=own.norms(architecture.mlp_norms),
        **matrices,
    )


def _regrouped(joint: Tensor, heads: Heads) -> Tensor:
    """Regroups GPT-NeoX's queries, keys and values, kept by head: (heads, 3, width, …) to (3, heads, width, …)."""
    return joint.view(heads.queries, 3, heads.width, -1).transpose(0, 1).reshape(joint.shape)


def _scope(config: PretrainedConfig, heads: Heads, kind: str | None) -> Scope:
    causal = looks_back_only(config)
    window: int | None = getattr(config, "sliding_window", None)
    # A list of layer types says where the window applies; Mistral has none and applies it everywhere.
    windowed = kind == "sliding_attention" or (kind is None and config.model_type == "mistral")
    # transformers counts ModernBERT's window without the token itself, all others with it.
    own = 0 if config.model_type == "modernbert" else 1
    reach = window - own if windowed and window is not None else -1
    scalar = getattr(config, "query_pre_attn_scalar", None) or heads.width
    return Scope(
        left=reach,
        right=0 if causal else reach,
        query_scale=(heads.width / scalar) ** 0.5,
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def _layer_type(config: PretrainedConfig, number: int) -> str | None:
    types = getattr(config, "layer_types", None)
    return types[number] if types else None


def _rotation(backbone: PreTrainedModel, kind: str | None, positions: int, device: torch.device) -> Rotation | None:
    rotary: Any = getattr(backbone, "rotary_emb", None)
    if rotary is None:
        return None
    prefix = "" if hasattr(rotary, "inv_freq") else f"{kind}_"
    frequencies, scaling = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
    angles = torch.arange(positions, device=device).float()[:, None] * frequencies.to(device).float()
    return Rotation(angles.cos() * scaling, angles.sin() * scaling)


def _activation(config: PretrainedConfig) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _known(config: PretrainedConfig) -> Architecture:
    cure = "make an ONNX graph (care export)"
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise BadEncoder(f"torch encodes {', '.join(ARCHITECTURES)} here, not {config.model_type}; {cure}")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes,) if "rope_type" in ropes else ropes.values():
        if rope is not None and rope["rope_type"] not in ROPES:
            raise BadEncoder(f"rope type {rope['rope_type']!r} is not supported, only {', '.join(ROPES)}; {cure}")
    if _activation(config) not in ACTIVATIONS:
        raise BadEncoder(f"activation {_activation(config)!r} is not supported, only {', '.join(ACTIVATIONS)}; {cure}")
    if getattr(config, "position_embedding_type", "absolute") not in ("absolute", "rope"):
        raise BadEncoder(f"position_embedding_type {config.position_embedding_type!r} is not supported; {cure}")
    if getattr(config, "is_decoder", False):
        raise BadEncoder(f"a {config.model_type} used as a decoder is not supported; {cure}")
    return architecture
