"""Times work on a device, and measures the device's limit: large square products, and those of a layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from models.bench.shapes import Shape
from models.encoder.packed.kernels import Dense, Scaled, quantise

ROUNDS = 5
# Long enough for the GPU to reach the clock that it keeps under load.
ROUND_SECONDS = 0.3
# A rough rate, to choose how many calls make a round.
EXPECTED = 600e12


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds until the device has finished the work."""
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Spread:
    """The middle of several figures, and the least and the largest."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.middle:.1f} ({self.least:.1f} … {self.most:.1f})"


def repeated(work: Callable[[], object], device: torch.device, rounds: int, calls: int) -> Spread:
    """Seconds of one call, in rounds of several, after one round that does not count."""

    def run() -> None:
        for _ in range(calls):
            work()

    run()
    return Spread.of([seconds(run, device) / calls for _ in range(rounds)])


def ceiling(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...]) -> dict[str, Any]:
    """TFLOP/s of square products in `dtype` and in fp8, random values in both; the best size counts."""
    found: dict[str, Any] = {"bf16": {}, "fp8": {}}
    for size in sizes:
        one, two = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        calls = _calls(2.0 * size**3, device)
        plain = repeated(partial(torch.mm, one, two.t()), device, ROUNDS, calls)
        found["bf16"][size] = 2 * size**3 / plain.middle / 1e12
        scaled = repeated(partial(Scaled.of(Dense(two)), quantise(one)), device, ROUNDS, calls)
        found["fp8"][size] = 2 * size**3 / scaled.middle / 1e12
        print(f"  {size}³: bf16 {found['bf16'][size]:.1f} TFLOP/s, fp8 by rows {found['fp8'][size]:.1f}", flush=True)
    return found | {"bf16_best": max(found["bf16"].values()), "fp8_best": max(found["fp8"].values())}


def products(shape: Shape, device: torch.device, dtype: torch.dtype, tokens: int) -> dict[str, dict[str, float]]:
    """TFLOP/s of a layer's four products on this number of tokens: by each library, in place, and in fp8."""
    on_gpu = device.type == "cuda"
    narrow = torch.compile(quantise) if on_gpu else quantise
    found: dict[str, dict[str, float]] = {}
    for name, (rows, columns) in shape.matrices().items():
        dense = Dense(torch.randn(rows, columns, device=device, dtype=dtype))
        inputs = torch.randn(tokens, columns, device=device, dtype=dtype)
        residual = torch.zeros(tokens, rows, device=device, dtype=dtype)
        scaled, quantised = Scaled.of(dense), quantise(inputs)
        ways: dict[str, Callable[[], object]] = {
            "plain": partial(dense, inputs),
            "in place": partial(dense.add_to, residual, inputs),
            "fp8": partial(scaled, quantised),
            "fp8 with quantising": lambda scaled=scaled, inputs=inputs: scaled(narrow(inputs)),  # type: ignore[misc]
        }
        rates: dict[str, float] = {}
        for library in ("cublas", "cublaslt") if on_gpu else ("cpu",):
            if on_gpu:
                torch.backends.cuda.preferred_blas_library(library)
            for way, work in ways.items():
                flops = 2.0 * rows * columns * tokens
                label = f"{library} {way}" if on_gpu else way
                rates[label] = flops / repeated(work, device, ROUNDS, _calls(flops, device)).middle / 1e12
        if on_gpu:
            torch.backends.cuda.preferred_blas_library("default")
        found[name] = rates
        shown = ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())
        print(f"  {shape.name} {name} {rows} × {columns}: {shown} TFLOP/s", flush=True)
    return found


def _calls(flops: float, device: torch.device) -> int:
    """How many products make a round."""
    return max(2, int(ROUND_SECONDS * EXPECTED / flops)) if device.type == "cuda" else 1
