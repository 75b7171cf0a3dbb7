"""Linear layers in 8 bits under LoRA: a large base that is not trained takes half of bf16's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Int8Product(torch.autograd.Function):
    """x · Wᵀ with W = weight · scale; the gradient is that of x alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:  # noqa: ANN401 - torch's own context
        ctx.save_for_backward(weight, scale)
        return functional.linear(x, weight.to(x.dtype) * scale.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        weight, scale = ctx.saved_tensors
        return gradient @ (weight.to(gradient.dtype) * scale.to(gradient.dtype)), None, None


class Int8Linear(nn.Module):
    """A frozen linear layer in 8 bits with one scale a row. Weights are widened when used and never kept wide."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        wide = linear.weight.detach().float()
        scale = wide.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        self.register_buffer("weight", (wide / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        product: Tensor = _Int8Product.apply(x, self.weight, self.scale)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


def quantize_base(model: nn.Module) -> int:
    """Puts the base of every adapted linear layer into 8 bits, in place; returns how many there were."""
    adapted = [module for module in model.modules() if isinstance(getattr(module, "base_layer", None), nn.Linear)]
    for module in adapted:
        module.base_layer = Int8Linear(module.base_layer)  # type: ignore[arg-type]
    return len(adapted)
