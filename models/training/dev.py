"""How good a stage's encoders are right now, on development sets. The figures are `care eval`'s."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from models.errors import BadData
from models.evaluation.judge import figures
from models.evaluation.reading import find_tasks
from models.evaluation.sets import METRICS, Kind, RetrievalSet, Task
from models.evaluation.systems import top
from models.spec import Side
from models.training.recipe import Dev
from models.training.tables import Texts

DEPTH = 100
QUERIES_AT_ONCE = 256

Read = Callable[[Texts], Tensor]
"""Vectors (texts, dim) of texts, by whoever reads their side."""


class DevSets:
    """Retrieval sets that stages are judged by."""

    def __init__(self, settings: Dev, tasks: list[Task]) -> None:
        self.every, self.metric = settings.every, settings.metric
        self._tasks = tasks

    @classmethod
    def load(cls, settings: Dev) -> DevSets:
        tasks = [task for task in find_tasks(settings.folder) if isinstance(task.data, RetrievalSet)]
        known = METRICS[Kind.RETRIEVAL]
        if settings.metric not in known:
            raise BadData(f"dev.metric: {settings.metric!r} is not one of {', '.join(known)}")
        if not tasks:
            raise BadData(f"{settings.folder}: no retrieval set; python -m models.training.holdout makes some")
        return cls(settings, tasks)

    def figure(self, read: Read) -> float:
        """The metric in percent, mean over the sets."""
        return float(np.mean([self._of(task, read) for task in self._tasks]))

    def _of(self, task: Task, read: Read) -> float:
        data = task.data
        assert isinstance(data, RetrievalSet)
        queries = read(Texts(Side.QUERY, data.queries)).float()
        documents = read(Texts(Side.DOCUMENT, data.documents)).float()
        rankings = [
            top(row, DEPTH)
            for first in range(0, len(queries), QUERIES_AT_ONCE)
            for row in (queries[first : first + QUERIES_AT_ONCE] @ documents.T).numpy()
        ]
        found, _ = figures(task, rankings)
        return found[self.metric]
