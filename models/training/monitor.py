"""What a run shows: progress, a log in JSON lines, figures on development sets, and curves at the end."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from models.encoder.spec import Side
from models.errors import BadData
from models.evaluation.judge import figures
from models.evaluation.sets import METRICS, Kind, RetrievalSet, Task, find_tasks
from models.evaluation.systems import top
from models.progress import Progress
from models.training.ranks import Ranks
from models.training.recipe import Dev
from models.training.tables import Texts

LOG_FILE, CURVES_FILE = "log.jsonl", "curves.png"
LOG_EVERY = 10


class Watch:
    """Shows and logs one stage; ranks other than the first are silent."""

    def __init__(self, folder: Path, stage: str, first: int, steps: int, ranks: Ranks) -> None:
        self._folder, self._stage, self._steps, self._ranks = folder, stage, steps, ranks
        self._first, self._began = first, time.monotonic()
        self._texts = self._tokens = 0.0

    def __enter__(self) -> Self:
        quiet = not self._ranks.is_first
        self._bar = Progress(self._stage, "steps", self._steps, first=self._first, quiet=quiet).__enter__()
        self._log = (self._folder / LOG_FILE).open("a", encoding="utf-8") if self._ranks.is_first else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
        if self._log is not None:
            self._log.close()

    def step(self, done: int, facts: Mapping[str, float], lr: float) -> None:
        """Counts a step that is done; every tenth, the first and the last are logged."""
        self._texts += facts["texts"]
        self._tokens += facts["tokens"]
        seconds = time.monotonic() - self._began
        memory = _memory_gib(self._ranks.device)
        shown = {"loss": f"{facts['loss']:.3f}", "texts/s": f"{self._texts / seconds:.0f}", "GiB": f"{memory:.1f}"}
        self._bar.update(facts=shown)
        if done % LOG_EVERY == 0 or done in (self._first + 1, self._steps):
            speeds = {"texts_per_second": self._texts / seconds, "tokens_per_second": self._tokens / seconds}
            self.log({"step": done, **facts, "lr": lr, **speeds, "seconds": seconds, "memory_gib": memory})

    def log(self, line: Mapping[str, object]) -> None:
        if self._log is not None:
            print(json.dumps({"stage": self._stage, **line}), file=self._log, flush=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._ranks.is_first:
            self._bar.write(f"{self._stage}, {text}")


def _memory_gib(device: torch.device) -> float:
    """The most that was held so far: on the card, or by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def draw_curves(folder: Path) -> Path | None:
    """Loss and development figure of each stage by step, as a picture; None where nothing was logged."""
    stages = read_log(folder)
    if not stages:
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 9}):
        picture = Figure(figsize=(6.4, 2.6 * len(stages)), layout="constrained")
        axes = picture.subplots(len(stages), 1, squeeze=False)[:, 0]
        for axis, (name, lines) in zip(axes, stages.items(), strict=True):
            losses = [line for line in lines if "loss" in line]
            axis.plot([line["step"] for line in losses], [line["loss"] for line in losses], color="tab:blue")
            axis.set(title=name, xlabel="step", ylabel="loss")
            judged = [line for line in lines if "dev" in line]
            if judged:
                other = axis.twinx()
                other.plot(
                    [line["step"] for line in judged], [line["dev"] for line in judged], "o-", color="tab:orange"
                )
                other.set_ylabel(judged[0]["metric"])
        picture.savefig(folder / CURVES_FILE, dpi=150)
    return folder / CURVES_FILE


def read_log(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The log's lines by stage, in order of steps; of a step that was done twice the later line counts."""
    path = folder / LOG_FILE
    found: dict[str, dict[tuple[int, bool], dict[str, Any]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # cut off by a kill or a full disk
            continue
        found.setdefault(line["stage"], {})[line["step"], "dev" in line] = line
    return {stage: [lines[key] for key in sorted(lines)] for stage, lines in found.items()}


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
