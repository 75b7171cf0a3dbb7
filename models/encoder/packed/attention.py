"""Attention over packed batches, within each document: two backends that give the same numbers.

A backend prepares what layers of one kind share, once a batch, and gives the function that each of them calls: queries
(tokens, heads, width), keys and values (tokens, key heads, width) to (tokens, heads, width).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from models.encoder.packed.kernels import Packed

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Scope(NamedTuple):
    """Which tokens a token attends to, and how scores are scaled; layers may differ in it."""

    left: int = -1
    """tokens before it; -1: all of them"""
    right: int = 0
    """tokens after it: 0 in a causal layer; -1: all of them"""
    query_scale: float = 1.0
    """factor of the queries beyond the usual 1 / sqrt(width)"""
    softcap: float | None = None
    """scores are squeezed below this by tanh"""


Backend = Callable[[Packed, Scope], Attend]


def varlen(batch: Packed, scope: Scope) -> Attend:
    """torch's variable-length flash attention; half precision on a GPU only."""
    if scope.softcap is not None:
        return padded(batch, scope)
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key heads without being told.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    options: dict[str, Any] = {"window_size": (scope.left, scope.right), **grouped}
    extent = (batch.boundaries, batch.boundaries, batch.longest, batch.longest)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scaled = queries if scope.query_scale == 1.0 else queries * scope.query_scale
        return cast(Tensor, varlen_attn(scaled, keys, values, *extent, **options))

    return attend


def padded(batch: Packed, scope: Scope) -> Attend:
    """Scaled dot-product attention over a padded grid."""
    documents, longest = len(batch.boundaries) - 1, batch.longest
    row = torch.bucketize(torch.arange(len(batch.ids), device=batch.ids.device), batch.boundaries[1:], right=True)
    slots = row * longest + batch.positions
    # Padding follows the tokens, so plain causality hides it without a mask, and kernels without a mask are quicker.
    plain = (scope.left, scope.right, scope.softcap) == (-1, 0, None)
    mask = None if plain else _mask(batch, scope)

    def grid(part: Tensor) -> Tensor:
        empty = part.new_zeros((documents * longest, *part.shape[1:]))
        return empty.index_copy_(0, slots, part).view(documents, longest, *part.shape[1:]).transpose(1, 2)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scale = scope.query_scale / queries.shape[-1] ** 0.5
        parts = grid(queries), grid(keys), grid(values)
        if scope.softcap is not None:
            found = _capped(*parts, mask, scale, scope.softcap)
        else:
            found = functional.scaled_dot_product_attention(
                *parts, attn_mask=mask, is_causal=plain, scale=scale, enable_gqa=True
            )
        return found.transpose(1, 2).flatten(0, 1)[slots]

    return attend


def _mask(batch: Packed, scope: Scope) -> Tensor:
    """Returns which keys each query sees, (documents, 1, longest, longest); padding sees itself: no row is empty."""
    places = torch.arange(batch.longest, device=batch.ids.device)
    ahead = places[None, :] - places[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if scope.left >= 0:
        seen &= ahead >= -scope.left
    if scope.right >= 0:
        seen &= ahead <= scope.right
    lengths = batch.boundaries.diff()
    real = places[None, :] < lengths[:, None]
    return ((seen[None] & real[:, None, :]) | (ahead == 0)[None])[:, None]


def _capped(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """Attention whose scores are `cap · tanh(score / cap)`, which no fused kernel of torch computes."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = cap * torch.tanh((queries.float() @ keys.float().transpose(-1, -2)) * scale / cap)
    assert mask is not None
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return (weights @ values.float()).to(queries.dtype)


BACKENDS: dict[str, Backend] = {"varlen": varlen, "padded": padded}


def default_backend(device: torch.device) -> Backend:
    return varlen if device.type == "cuda" else padded
