"""A layer's matrices: as they are, or in fp8 with a scale for each output channel and each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

Quantised = tuple[Tensor, Tensor]
"""(rows, columns) in fp8, and the scale of each row, (rows, 1) float32"""
Activation = Tensor | Quantised


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix (outputs, inputs) in the encoder's own numbers."""

    weight: Tensor
    bias: Tensor | None = None
    quantised = False

    def __call__(self, inputs: Activation) -> Tensor:
        assert isinstance(inputs, Tensor)
        return functional.linear(inputs, self.weight, self.bias)

    def add_to(self, residual: Tensor, inputs: Activation) -> None:
        """Adds the product in place: the matrix kernel does it on its way out, with no pass over memory of its own."""
        assert isinstance(inputs, Tensor)
        residual.addmm_(inputs, self.weight.t())


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix (outputs, inputs) in fp8 and the scale of each output, (1, outputs); products are in `dtype`."""

    weight: Tensor
    scale: Tensor
    dtype: torch.dtype
    bias: Tensor | None = None
    quantised = True

    @classmethod
    def of(cls, dense: Dense) -> Scaled:
        weight, scale = quantise(dense.weight)
        return cls(weight, scale.t().contiguous(), dense.weight.dtype, dense.bias)

    def __call__(self, inputs: Activation) -> Tensor:
        values, scale = inputs
        if values.is_cuda:
            product = torch._scaled_mm(
                values, self.weight.t(), scale, self.scale, out_dtype=self.dtype, use_fast_accum=True
            )
        else:  # no such kernel: the same numbers, multiplied in float32
            product = ((values.float() @ self.weight.float().t()) * scale * self.scale).to(self.dtype)
        return product if self.bias is None else product.add_(self.bias)

    def add_to(self, residual: Tensor, inputs: Activation) -> None:
        residual.add_(self(inputs))


Linear = Dense | Scaled


def quantise(values: Tensor) -> Quantised:
    """Rows in fp8, each scaled so that its largest value is the largest of fp8."""
    wide = values.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale
