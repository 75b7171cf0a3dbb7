"""A batch of any size through an encoder, a chunk at a time, with the gradient of one pass (gradient caching).

First pass: the vectors, without a graph. The loss then gives each vector its gradient, and the second pass carries it
into the weights. What fits at once keeps its graphs instead. Dropout is seeded by step, reading and chunk, so
that both passes see the same masks. Knows nothing of the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.torch_encoder import TorchEncoder
from models.training.ranks import Ranks
from models.training.tables import Rows, TokenTable, chunks_of

PARTS = 8
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Half precision on a graphics card; a CPU computes in float32 whatever the recipe says."""
    enabled = device.type == "cuda" and precision in AUTOCAST
    return torch.autocast(device.type, dtype=AUTOCAST.get(precision, torch.bfloat16), enabled=enabled)


@dataclass
class Reading:
    """Texts that one encoder reads in a step: rows of its token table."""

    encoder: TorchEncoder
    tokens: TokenTable
    rows: Rows
    leaf: Tensor = field(init=False)
    """Vectors (rows, native_dim) of all ranks, where the loss leaves its gradient."""
    kept: list[Tensor] = field(init=False, default_factory=list)
    """The chunks' vectors with their graphs, if all of them fit."""


class Passes:
    """The two passes of one step over its readings."""

    def __init__(self, readings: Sequence[Reading], ranks: Ranks, *, tokens: int, precision: str, seed: int) -> None:
        self._readings, self._ranks = readings, ranks
        self._precision, self._seed = precision, seed
        shares = [ranks.share(len(reading.rows)) for reading in readings]
        lengths = [reading.tokens.lengths[reading.rows[own]] for reading, own in zip(readings, shares, strict=True)]
        # What is kept is still cut by length, for less padding.
        small = [chunks_of(of_reading, max(1, tokens // PARTS)) for of_reading in lengths]
        sizes = [_padded(of_reading, chunks) for of_reading, chunks in zip(lengths, small, strict=True)]
        self._keeps, kept = graphs_kept(sizes, tokens)
        self._chunks: list[list[Rows]] = [
            [own[chunk] for chunk in (cut if keep else chunks_of(of_reading, tokens - kept))]
            for own, of_reading, cut, keep in zip(shares, lengths, small, self._keeps, strict=True)
        ]

    def forward(self) -> None:
        """Fills every reading's leaf."""
        for number, reading in enumerate(self._readings):
            leaf = torch.zeros(len(reading.rows), reading.encoder.spec.native_dim, device=self._ranks.device)
            with torch.set_grad_enabled(self._keeps[number]):
                for place, chunk in enumerate(self._chunks[number]):
                    vectors = self._encode(number, place)
                    leaf[torch.from_numpy(chunk).to(leaf.device)] = vectors.detach()
                    if self._keeps[number]:
                        reading.kept.append(vectors)
            reading.leaf = self._ranks.sum(leaf).requires_grad_(True)

    def backward(self) -> None:
        """Carries the leaves' gradients into the weights; those of several ranks are not yet added up."""
        for number, reading in enumerate(self._readings):
            if reading.leaf.grad is None:
                continue
            for place, chunk in enumerate(self._chunks[number]):
                vectors = reading.kept[place] if self._keeps[number] else self._encode(number, place)
                gradient = reading.leaf.grad[torch.from_numpy(chunk).to(vectors.device)]
                vectors.backward(gradient)  # type: ignore[no-untyped-call]
            reading.kept.clear()

    @property
    def padded_tokens(self) -> int:
        """What the chunks of this rank hold, padding included."""
        return sum(
            _padded(reading.tokens.lengths[reading.rows], chunks)
            for reading, chunks in zip(self._readings, self._chunks, strict=True)
        )

    def _encode(self, number: int, place: int) -> Tensor:
        reading, chunk = self._readings[number], self._chunks[number][place]
        torch.manual_seed(
            int(np.random.SeedSequence([self._seed, self._ranks.rank, number, place]).generate_state(1)[0])
        )
        with autocast(self._ranks.device, self._precision):
            return reading.encoder.pooled(*reading.tokens.padded(reading.rows[chunk]), padded_right=True)


def _padded(lengths: Rows, chunks: list[Rows]) -> int:
    return sum(len(chunk) * int(lengths[chunk].max()) for chunk in chunks)


def graphs_kept(sizes: Sequence[int], tokens: int) -> tuple[list[bool], int]:
    """Which readings keep their graphs, and their tokens: all if they fit together, else what fits into a half.

    The other half is for the chunks that pass through beside them.
    """
    room = tokens if sum(sizes) <= tokens else tokens // 2
    keeps: list[bool] = []
    for size in sizes:
        keeps.append(size <= room)
        room -= size if keeps[-1] else 0
    return keeps, sum(size for size, keep in zip(sizes, keeps, strict=True) if keep)
