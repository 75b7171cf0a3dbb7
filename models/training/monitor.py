"""Monitors a run: progress, a log in JSON lines, metrics on development sets, and curves at the end."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from models.encoder.spec import Side
from models.errors import BadData
from models.evaluation.encoders import Reranker
from models.evaluation.judge import figures
from models.evaluation.sets import METRICS, Kind, RetrievalSet, Task, find_tasks
from models.evaluation.systems import DEPTH, rerank, search
from models.lexical import Ranking
from models.progress import Progress
from models.training.ranks import Ranks
from models.training.recipe import Dev
from models.training.texts import Texts

LOG_FILE, CURVES_FILE = "log.jsonl", "curves.png"
LOG_EVERY = 10


class Watch:
    """Shows and logs one stage; ranks other than the first are silent."""

    def __init__(self, folder: Path, stage: str, first: int, ranks: Ranks) -> None:
        self._folder, self._stage, self._first, self._ranks = folder, stage, first, ranks
        self._began = time.monotonic()
        self._texts = self._tokens = 0.0

    def __enter__(self) -> Self:
        shown = self._ranks.is_first
        self._bar = Progress(self._stage, "steps", first=self._first, quiet=not shown).__enter__()
        self._log = (self._folder / LOG_FILE).open("a", encoding="utf-8") if shown else None
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)
        if self._log is not None:
            self._log.close()

    def step(self, done: int, steps: int, facts: Mapping[str, float | Tensor], lr: float) -> None:
        """Counts a step that is done of those that are expected; every tenth, the first and the last are logged."""
        self._texts += float(facts["texts"])
        self._tokens += float(facts["tokens"])
        shown = None
        if done % LOG_EVERY == 0 or done in (self._first + 1, steps):
            figures = {name: float(value) if isinstance(value, Tensor) else value for name, value in facts.items()}
            shown = self._logged(done, figures, lr)
        self._bar.update(facts=shown, total=steps)

    def _logged(self, done: int, facts: Mapping[str, float], lr: float) -> dict[str, str]:
        """Logs a step, and returns what the bar shows of it."""
        seconds = time.monotonic() - self._began
        if self._ranks.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self._ranks.device) / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        speeds = {"texts_per_second": self._texts / seconds, "tokens_per_second": self._tokens / seconds}
        self.log({"step": done, **facts, "lr": lr, **speeds, "seconds": seconds, "memory_gib": memory})
        return {"loss": f"{facts['loss']:.3f}", "texts/s": f"{self._texts / seconds:.0f}", "GiB": f"{memory:.1f}"}

    def log(self, line: Mapping[str, object]) -> None:
        if self._log is not None:
            print(json.dumps({"stage": self._stage, **line}), file=self._log, flush=True)

    def write(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._ranks.is_first:
            self._bar.write(f"{self._stage}, {text}")


class DevSets:
    """Retrieval sets that stages are judged by, with the figures of `care eval`."""

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

    def figure(self, read: Callable[[Texts], Tensor]) -> float:
        """Returns the metric in percent, mean over the sets; `read` gives vectors (texts, dim) of texts."""
        return self._mean(self.rankings(read))

    def rankings(self, read: Callable[[Texts], Tensor]) -> list[list[Ranking]]:
        """Returns what an exact search finds for each query of each set."""
        found = []
        for task in self._tasks:
            assert isinstance(task.data, RetrievalSet)
            queries = read(Texts(Side.QUERY, task.data.queries)).float().numpy()
            documents = read(Texts(Side.DOCUMENT, task.data.documents)).float().numpy()
            found.append(search(queries, documents, DEPTH))
        return found

    def reranked(self, first: list[list[Ranking]], reranker: Reranker, depth: int) -> tuple[float, float]:
        """Returns the metric of these rankings, and of the same with their first `depth` documents in another order."""
        second = [
            rerank(task.data, of_task, reranker, depth)
            for task, of_task in zip(self._tasks, first, strict=True)
            if isinstance(task.data, RetrievalSet)
        ]
        return self._mean(first), self._mean(second)

    def _mean(self, rankings: list[list[Ranking]]) -> float:
        answered = zip(self._tasks, rankings, strict=True)
        return float(np.mean([figures(task, of_task)[0][self.metric] for task, of_task in answered]))


def draw_curves(folder: Path) -> Path | None:
    """Loss and development figure of each stage by step, as a picture; None where nothing was logged."""
    stages = read_log(folder)
    if not stages:
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    def columns(lines: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
        return [line["step"] for line in lines if key in line], [line[key] for line in lines if key in line]

    with mpl.rc_context({"font.size": 9}):
        picture = Figure(figsize=(6.4, 2.6 * len(stages)), layout="constrained")
        axes = picture.subplots(len(stages), 1, squeeze=False)[:, 0]
        for axis, (name, lines) in zip(axes, stages.items(), strict=True):
            axis.plot(*columns(lines, "loss"), color="tab:blue")
            axis.set(title=name, xlabel="step", ylabel="loss")
            if metrics := [line["metric"] for line in lines if "dev" in line]:
                other = axis.twinx()
                other.plot(*columns(lines, "dev"), "o-", color="tab:orange")
                other.set_ylabel(metrics[0])
        picture.savefig(folder / CURVES_FILE, dpi=150)
    return folder / CURVES_FILE


def read_log(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Reads the log's lines by stage, in order of steps; of a step that was done twice the later line counts."""
    path = folder / LOG_FILE
    found: dict[str, dict[tuple[int, bool], dict[str, Any]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # cut off by a kill or a full disk
            continue
        found.setdefault(line["stage"], {})[line["step"], "dev" in line] = line
    return {stage: [lines[key] for key in sorted(lines)] for stage, lines in found.items()}
