"""Times of work on a device, and what is said of several of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds until the device has done it."""
    finish(device)
    start = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - start


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
