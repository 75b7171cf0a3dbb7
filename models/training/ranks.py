"""Ranks of distributed training: which process this is, and how tensors are summed. One process is one rank.

`accelerate launch` starts the processes. All deal the same batches, and each reads its share of the texts.
"""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WAIT = timedelta(hours=12)


class Ranks:
    """Rank `rank` of `size`, computing on `device`."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.is_first = rank == 0

    @classmethod
    def join(cls, device: str | None = None) -> Ranks:
        """Joins the other processes, if this one was started among several."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(0, 1, torch.device(device))
        from accelerate import PartialState

        # The others wait while the first rank reads and tokenises what may be millions of texts.
        state = PartialState(cpu=device == "cpu", timeout=WAIT)
        return cls(state.process_index, state.num_processes, state.device)

    def share(self, count: int) -> NDArray[np.int64]:
        """Returns the positions among `count` that this rank reads."""
        return np.arange(self.rank, count, self.size)

    def seed(self, *parts: int) -> int:
        """Returns a seed of these numbers and of this rank: no two ranks and no two lists of numbers share one."""
        return int(np.random.SeedSequence([self.rank, *parts]).generate_state(1, np.uint64)[0])

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums over all ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Returns when every rank has come here."""
        if self.size > 1:
            torch.distributed.barrier()

    def of_first(self, value: float) -> float:
        """Returns the first rank's value, on every rank."""
        if self.size == 1:  # else a GPU would be waited for, at every step of a stage that has minutes
            return value
        return float(self.sum(torch.tensor(value if self.is_first else 0.0, dtype=torch.float64, device=self.device)))

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set on any rank."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(int(flag), device=self.device)))
