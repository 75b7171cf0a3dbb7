"""Causal attention within each document of a packed batch, in two ways that give the same numbers.

A backend prepares what all layers share once a batch, and gives the function that each layer calls:
queries (tokens, heads, width), keys and values (tokens, key heads, width) to (tokens, heads, width).
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from models.packed.layout import Packed

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Backend = Callable[[Packed], Attend]


def varlen(batch: Packed) -> Attend:
    """torch's variable-length flash attention; half precision on a graphics card only."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer key heads without being told.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    options: dict[str, Any] = {"window_size": (-1, 0), **grouped}
    extent = (batch.boundaries, batch.boundaries, batch.longest, batch.longest)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return cast(Tensor, varlen_attn(queries, keys, values, *extent, **options))

    return attend


def padded(batch: Packed) -> Attend:
    """Scaled dot-product attention over a padded grid. Padding follows the tokens, so causality alone hides it."""
    documents, longest = len(batch.boundaries) - 1, batch.longest
    row = torch.bucketize(torch.arange(len(batch.ids), device=batch.ids.device), batch.boundaries[1:], right=True)
    slots = row * longest + batch.positions

    def grid(part: Tensor) -> Tensor:
        empty = part.new_zeros((documents * longest, *part.shape[1:]))
        return empty.index_copy_(0, slots, part).view(documents, longest, *part.shape[1:]).transpose(1, 2)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        found = functional.scaled_dot_product_attention(
            grid(queries), grid(keys), grid(values), is_causal=True, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)[slots]

    return attend


BACKENDS: dict[str, Backend] = {"varlen": varlen, "padded": padded}


def default_backend(device: torch.device) -> Backend:
    return varlen if device.type == "cuda" else padded
