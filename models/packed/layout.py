"""Documents laid end to end: one run of tokens, and where each document begins. Knows nothing of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.tokenizer import Tokens, flatten

# Matrix kernels are written for whole tiles; at most 63 tokens of a batch are filler.
TILE = 64
# More than twice the tokens of the longest text that fp8 was seen to tip over (docs/adr/0008).
SHORT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch on its device. The filler at its end, if any, is one more document, which `last` leaves out."""

    ids: Tensor
    """(tokens,) int32"""
    positions: Tensor
    """(tokens,) int64: each token's place in its document"""
    boundaries: Tensor
    """(documents + 1,) int32: where documents begin, and the end"""
    last: Tensor
    """(documents,) int64: the row of each document's last token"""
    longest: int
    """tokens of the longest document"""
    short: bool
    """whether a document has at most SHORT_TOKENS tokens"""


def pack(batch: Sequence[Tokens], device: torch.device) -> Packed:
    """Lays the documents out and sends them to the device, without waiting for it."""
    ids, lengths = flatten(batch)
    return lay_out(_send(ids, device), lengths)


def lay_out(ids: Tensor, lengths: NDArray[np.integer]) -> Packed:
    """A batch of documents whose tokens already lie end to end on their device."""
    device, tokens = ids.device, len(ids)
    last = np.cumsum(lengths, dtype=np.int64) - 1
    short = bool(lengths.min() <= SHORT_TOKENS)
    filler = -tokens % TILE
    if filler:
        ids = functional.pad(ids, (0, filler))
        lengths = np.append(lengths, filler)
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.arange(len(ids)) - np.repeat(boundaries[:-1], lengths)
    ends = _send(boundaries.astype(np.int32), device)
    return Packed(ids, _send(positions, device), ends, _send(last, device), int(lengths.max()), short)


def _send(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
