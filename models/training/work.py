"""Base class of the stages that train: reads rows, makes the batch of a step, writes encoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from models.errors import BadData
from models.progress import Progress
from models.rows import read_all
from models.training.batches import BatchDealer, steps_of
from models.training.encoders import EncoderStore
from models.training.ranks import Ranks
from models.training.rows import as_pairs, as_texts, sampled, without
from models.training.stages import Data, TrainedStage, trained_by
from models.training.tables import PairTable, shared


class Work(ABC):
    """The work of one stage, a step at a time; `_table` has the texts that its steps draw."""

    _stage: TrainedStage

    def __init__(self, store: EncoderStore, stage: TrainedStage, table: PairTable, scratch: Path) -> None:
        self._store, self._stage, self._ranks, self._scratch = store, stage, store.ranks, scratch
        recipe, data = store.recipe, stage.data
        rows, most = np.array([len(own) for own in table.sources.values()]), recipe.max_steps
        self.steps = steps_of(rows, stage.batch, stage.epochs, stage.steps, most, weighted=bool(data.weights))
        self._deal = partial(
            BatchDealer, weights=data.weights, size=stage.batch, steps=self.steps, negatives=data.negatives,
            seed=recipe.seed, epochs=stage.epochs or 1, leaf=data.leaf, trial=most is not None,
        )  # fmt: skip
        drawn = self._deal(table).drawn()
        self._table = table.limited_to(drawn, negatives=data.negatives > 0) if len(drawn) < len(table) else table

    @property
    def data(self) -> str:
        """A hash of the rows that the steps draw."""
        return self._table.digest

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, Any]:
        """Returns the trained modules by name."""

    @abstractmethod
    def gradients(self, step: int, scale: Callable[[Tensor], Tensor]) -> Mapping[str, float | Tensor]:
        """Leaves the gradients of one step in the weights, and returns what it measured.

        Reading a tensor waits for the GPU: the loop reads few.
        """

    def keep(self, folder: Path) -> None:
        """Writes the trained encoders, which are then the current ones."""
        for name in trained_by(self._stage):
            self._store.keep(name, self.modules[name], folder / name)

    def write(self, folder: Path) -> None:
        """Writes the trained encoders as they are now."""
        for name in trained_by(self._stage):
            self._store.write(name, self.modules[name], folder / name)


def read_table(files: list[Path], data: Data, seed: int, folder: Path, ranks: Ranks) -> PairTable:
    """Returns the stage's rows, as pairs or as texts; the first rank reads them into the folder, all ranks map it."""

    def build() -> PairTable:
        rows = without(Progress(f"read {', '.join(map(str, files))}", "rows").over(read_all(files)), data.without)
        rows = sampled(rows, {}, data.halves, seed)
        if data.view == "texts":
            return PairTable.of_texts(as_texts(rows, data, seed), folder)
        return PairTable.of_pairs(as_pairs(rows, data.crops, seed, data.crop_units), folder=folder)

    table = shared(folder, ranks, build)
    check_shares(table, data)
    if data.negatives and not len(table.negatives.values):
        raise BadData(f"data.negatives is {data.negatives}, but no row has neg: mine some (kind mine), or set it to 0")
    return table


def check_shares(table: PairTable, data: Data) -> None:
    """Refuses weights and crops of sources that have no rows."""
    for key, named in (("weights", data.weights), ("crops", data.crops)):
        # A share of 0 asks for no row, and a recipe over another may leave out a source that the other one weighs.
        asked = (source for source, share in named.items() if share and source not in {"*", *data.without})
        table.check_sources(f"data.{key}", asked)
