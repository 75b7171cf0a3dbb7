"""torch's flex attention as a backend, to be compared: on an H200 it was slower than the variable-length one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from models.encoder.packed.attention import Attend, Scope
from models.encoder.packed.kernels import Packed


def flex(batch: Packed, scope: Scope) -> Attend:
    """torch's flex attention over blocks: those between two documents are never visited."""
    from torch.nn.attention.flex_attention import create_block_mask

    tokens, device = len(batch.ids), batch.ids.device
    documents = torch.bucketize(torch.arange(tokens, device=device), batch.boundaries[1:], right=True)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents[query] == documents[key]) & (query >= key)

    compiled = device.type == "cuda"
    mask = create_block_mask(visible, None, None, tokens, tokens, device=device.type, _compile=compiled)
    kernel = _flex_kernel(compiled=compiled)

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (queries, keys, values))
        return kernel(*parts, block_mask=mask, enable_gqa=True).squeeze(0).transpose(0, 1)

    return attend


@cache
def _flex_kernel(*, compiled: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    kernel = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
    return cast(Callable[..., Tensor], kernel)
