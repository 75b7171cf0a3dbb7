"""The card's own limit: the best rate of large square products, and that of the products that a layer is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.packed.linear import Dense, Scaled, quantise
from tests.bench.encode.clock import repeated
from tests.bench.encode.shapes import Shape

ROUNDS = 7


def ceiling(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Any]:
    """TFLOP/s of square products in `dtype` and in fp8, random values in both; the best size counts."""
    found: dict[str, Any] = {"bf16": {}, "fp8": {}}
    for size in sizes:
        one, two = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        calls = max(1, 8192**3 // size**3 * 8) if device.type == "cuda" else 1
        plain = repeated(lambda one=one, two=two: torch.mm(one, two.t()), device, ROUNDS, calls)
        found["bf16"][size] = 2 * size**3 / plain.middle / 1e12
        matrix, rows = Scaled.of(Dense(two)), quantise(one)
        scaled = repeated(lambda matrix=matrix, rows=rows: matrix(rows), device, ROUNDS, calls)
        found["fp8"][size] = 2 * size**3 / scaled.middle / 1e12
        print(f"  {size}³: bf16 {found['bf16'][size]:.1f} TFLOP/s, fp8 by rows {found['fp8'][size]:.1f}", flush=True)
    return found | {"bf16_best": max(found["bf16"].values()), "fp8_best": max(found["fp8"].values())}


def products(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, dict[str, float]]:
    """TFLOP/s of a layer's four products on so many tokens: by each library, in place, and in fp8."""
    found: dict[str, dict[str, float]] = {}
    for name, (rows, columns) in shape.matrices().items():
        weight = torch.randn(rows, columns, device=device, dtype=dtype)
        inputs = torch.randn(tokens, columns, device=device, dtype=dtype)
        work = 2.0 * rows * columns * tokens / 1e12
        rates = {}
        for library in ("cublas", "cublaslt") if device.type == "cuda" else ("cpu",):
            if device.type == "cuda":
                torch.backends.cuda.preferred_blas_library(library)
            rates[library] = work / _time(lambda w=weight, x=inputs: functional.linear(x, w), device)
            if name in ("out", "down"):
                residual = torch.zeros(tokens, rows, device=device, dtype=dtype)
                dense = Dense(weight)
                rates[f"{library} in place"] = work / _time(
                    lambda r=residual, d=dense, x=inputs: d.add_to(r, x), device
                )
        if device.type == "cuda":
            torch.backends.cuda.preferred_blas_library("default")
        scaled, quantised = Scaled.of(Dense(weight)), quantise(inputs)
        rates["fp8"] = work / _time(lambda s=scaled, q=quantised: s(q), device)
        rates["fp8 with quantising"] = work / _time(lambda s=scaled, x=inputs: s(_quantise(x)), device)
        found[name] = rates
        said = ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())
        print(f"  {shape.name} {name} {rows} × {columns}: {said} TFLOP/s", flush=True)
    return found


def _quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.compile(quantise) if values.is_cuda else quantise)(values)


def _time(work: Any, device: torch.device) -> float:  # noqa: ANN401 - a closure over its own arguments
    return repeated(work, device, ROUNDS, 8 if device.type == "cuda" else 1).middle
