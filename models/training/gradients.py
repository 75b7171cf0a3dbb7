"""A batch of any size through an encoder, a chunk at a time, with the gradient of one pass (gradient caching).

First pass: the vectors, without a graph. The loss then gives each vector its gradient, and the second pass carries it
into the weights. What fits into one chunk keeps its graph instead. Dropout is seeded by step, reading and chunk, so
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
    kept: Tensor | None = field(init=False, default=None)


class Passes:
    """The two passes of one step over its readings."""

    def __init__(self, readings: Sequence[Reading], ranks: Ranks, *, tokens: int, precision: str, seed: int) -> None:
        self._readings, self._ranks = readings, ranks
        self._precision, self._seed = precision, seed
        self._chunks: list[list[Rows]] = []
        for reading in readings:
            own = ranks.share(len(reading.rows))
            chunks = chunks_of(reading.tokens.lengths[reading.rows[own]], tokens) if len(own) else []
            self._chunks.append([own[chunk] for chunk in chunks])

    def forward(self) -> None:
        """Fills every reading's leaf."""
        for number, reading in enumerate(self._readings):
            chunks = self._chunks[number]
            width = reading.encoder.spec.native_dim
            leaf = torch.zeros(len(reading.rows), width, device=self._ranks.device)
            keeps = len(chunks) == 1
            with torch.set_grad_enabled(keeps):
                for place, chunk in enumerate(chunks):
                    vectors = self._encode(number, place)
                    leaf[torch.from_numpy(chunk).to(leaf.device)] = vectors.detach()
                    reading.kept = vectors if keeps else None
            reading.leaf = self._ranks.sum(leaf).requires_grad_(True)

    def backward(self) -> None:
        """Carries the leaves' gradients into the weights; those of several ranks are not yet added up."""
        for number, reading in enumerate(self._readings):
            if reading.leaf.grad is None:
                continue
            for place, chunk in enumerate(self._chunks[number]):
                vectors = self._encode(number, place) if reading.kept is None else reading.kept
                gradient = reading.leaf.grad[torch.from_numpy(chunk).to(vectors.device)]
                vectors.backward(gradient)  # type: ignore[no-untyped-call]
            reading.kept = None

    @property
    def padded_tokens(self) -> int:
        """What the chunks of this rank hold, padding included."""
        return sum(
            len(chunk) * int(reading.tokens.lengths[reading.rows[chunk]].max())
            for reading, chunks in zip(self._readings, self._chunks, strict=True)
            for chunk in chunks
        )

    def _encode(self, number: int, place: int) -> Tensor:
        reading, chunk = self._readings[number], self._chunks[number][place]
        torch.manual_seed(
            int(np.random.SeedSequence([self._seed, self._ranks.rank, number, place]).generate_state(1)[0])
        )
        with autocast(self._ranks.device, self._precision):
            return reading.encoder.pooled(*reading.tokens.padded(reading.rows[chunk]))
