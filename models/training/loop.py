"""Training loop: gradients, clipping, optimizer step, log, evaluation, checkpoint.

A step depends on the recipe and its number alone; so a stage that was stopped or killed ends in the same weights,
unless it has `minutes`. A checkpoint is written beside the old one and replaces it by renames: a kill leaves one of
them whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.errors import CareError
from models.training.adapters import restore_trained, trained_weights
from models.training.contrast import OBJECTIVE
from models.training.monitor import LOG_EVERY, Watch
from models.training.ranks import Ranks
from models.training.stages import TrainedStage
from models.training.work import Work

CHECKPOINT = "checkpoint"
META, WEIGHTS, OPTIMISER, BEST = "meta.json", "weights.safetensors", "optimiser.safetensors", "best.safetensors"


class Stopped(CareError):
    """The run was asked to stop, and did so after saving."""

    exit_code = 130


@dataclass(frozen=True, slots=True)
class Judge:
    """Measures a stage on the development sets every `every` steps."""

    every: int
    metric: str
    figure: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Progress:
    """How many steps of a stage are done, the best development figure with its step, and the fp16 loss scale."""

    step: int = 0
    best: float | None = None
    best_step: int | None = None
    scale: float | None = None
    seconds: float = 0.0
    """What they took, in a stage with a time limit."""
    data: str = ""
    """A hash of the rows; older checkpoints have none."""


def run(work: Work, settings: TrainedStage, name: str, folder: Path, ranks: Ranks, judge: Judge | None) -> int:
    """Runs a stage from where it stopped to its end, and returns how many steps it had.

    The weights are then the last, or the best by the dev sets.
    """
    home = folder / name / CHECKPOINT
    optimiser = make_optimiser(work.modules, settings)
    progress = restore(home, work.modules, optimiser)
    if progress.data not in ("", work.data):
        raise CareError(f"{name}: its rows are not those that it began with: put these back, or choose another --out")
    progress = replace(progress, data=work.data)
    half = settings.precision == "fp16" and ranks.device.type == "cuda"
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=half, init_scale=progress.scale or 2.0**16)
    limit = 60 * (settings.minutes or math.inf)
    with Watch(folder, name, progress.step, ranks) as watch, _stop_signals() as signals:
        for step in range(progress.step, work.steps if progress.seconds < limit else progress.step):
            began = time.monotonic()
            place = max(step, int(work.steps * progress.seconds / limit))
            share = schedule(place, work.steps, settings.warmup, settings.schedule)
            facts = _step(work, settings.clip, step, share, optimiser, scaler, ranks)
            done, scale = step + 1, scaler.get_scale() if half else None
            check = partial(_require_finite, facts["gradient_norm"], scale, f"{name}: the gradient of step {done}")
            # A GPU lags behind until a figure of it is read. Done now and then, it never waits for what is done here.
            if done % LOG_EVERY == 0 or half:
                check()
            # Steps alone count: judging and writing take as long as they take, also when a run goes on.
            passed = 0.0 if settings.minutes is None else ranks.of_first(time.monotonic() - began)
            seconds = progress.seconds + passed
            steps = min(work.steps, max(done, math.ceil(done * limit / seconds))) if seconds else work.steps
            ends, stopped = done == steps, ranks.any(bool(signals))
            judged = judge is not None and (ends or done % judge.every == 0)
            saved = ends or stopped or done % settings.checkpoint_every == 0
            if judged or saved or done in settings.snapshots:
                check()
            watch.step(done, steps, facts, lr=max(group["lr"] for group in optimiser.param_groups))
            progress = replace(progress, step=done, seconds=seconds, scale=scale)
            if judge is not None and judged:
                progress = _judged(progress, judge, watch, ranks)
            if done in settings.snapshots and ranks.is_first:
                work.write(folder / name / f"at-{done}")
            if saved or progress.best_step == done:
                if ranks.is_first:
                    save(home, work.modules, optimiser, progress)
                ranks.wait()
            if stopped:
                raise Stopped(
                    f"stopped after step {done} of {work.steps} of {name}; the same command goes on from there"
                )
            if ends:
                break
    if judge is not None:
        restore_best(home, work.modules)
    return progress.step


def _require_finite(norm: float | Tensor, scale: float | None, what: str) -> None:
    """Refuses a gradient from which no later step recovers."""
    # Half precision skips a step now and then, at a smaller scale each time; below 1 it has skipped them all.
    if not math.isfinite(norm) if scale is None else scale < 1:
        raise CareError(f"{what} is not finite: try another precision or a lower learning rate, in another --out")


def _step(
    work: Work, clip: float, step: int, share: float, optimiser: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
    ranks: Ranks,
) -> dict[str, float | Tensor]:  # fmt: skip
    for group in optimiser.param_groups:
        group["lr"] = group["peak"] * share
    optimiser.zero_grad(set_to_none=True)
    facts = work.gradients(step, scaler.scale)
    # Gradients are summed over the ranks; each rank has the objective's whole, for each computes the whole loss.
    for name, module in work.modules.items() if ranks.size > 1 else ():
        for parameter in module.parameters() if name != OBJECTIVE else ():
            if parameter.requires_grad:
                parameter.grad = ranks.sum(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    scaler.unscale_(optimiser)
    trained = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(trained, clip)
    scaler.step(optimiser)
    scaler.update()
    return {**facts, "gradient_norm": norm}


def _judged(progress: Progress, judge: Judge, watch: Watch, ranks: Ranks) -> Progress:
    # Two GPUs may round differently; what follows must be the same on all ranks.
    figure = ranks.of_first(judge.figure())
    watch.log({"step": progress.step, "dev": figure, "metric": judge.metric})
    better = progress.best is None or figure > progress.best
    watch.write(f"step {progress.step}: {judge.metric} {figure:.2f}{', the best so far' if better else ''}")
    return replace(progress, best=figure, best_step=progress.step) if better else progress


def make_optimiser(modules: Mapping[str, nn.Module], settings: TrainedStage) -> torch.optim.AdamW:
    """Makes AdamW without decay of vectors and scalars. A module without its own rate takes the highest."""
    rates = settings.lr if isinstance(settings.lr, dict) else {}
    default = max(rates.values()) if rates else settings.lr
    groups: list[dict[str, Any]] = []
    for name, module in modules.items():
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for decayed in (True, False):
            parameters = [parameter for parameter in trained if (parameter.ndim > 1) == decayed]
            decay = settings.weight_decay if decayed else 0.0
            if parameters:
                groups.append({"params": parameters, "weight_decay": decay, "peak": rates.get(name, default)})
    on_card = any(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=0.0, fused=on_card)


def schedule(step: int, steps: int, warmup: float, kind: str) -> float:
    """Share of the peak learning rate at a step: linear up to 1, then as the recipe says."""
    rise = round(steps * warmup) if warmup < 1 else round(warmup)
    if step < rise:
        return (step + 1) / rise
    left = max(0.0, (steps - step) / max(1, steps - rise))
    if kind == "constant":
        return 1.0
    return left if kind == "linear" else 0.5 * (1 - math.cos(math.pi * left))


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM, so that the step is finished first; a second Ctrl-C ends at once."""
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if heard and number == signal.SIGINT:
            raise KeyboardInterrupt
        heard.append(number)
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstops after this step, which is saved; a second Ctrl-C ends at once\n")

    on_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)} if on_main else {}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def weights_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Trained weights of several modules, by `module/weight`."""
    named = ((name, trained_weights(module)) for name, module in modules.items())
    return {f"{name}/{key}": value for name, weights in named for key, value in weights.items()}


def restore_weights(modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> None:
    for name, module in modules.items():
        prefix = f"{name}/"
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        restore_trained(module, own)


def save(folder: Path, modules: Mapping[str, nn.Module], optimiser: torch.optim.Optimizer, progress: Progress) -> None:
    """Replaces the checkpoint. The best weights are the modules' if this step is the best, else those of before."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    states = optimiser.state_dict()["state"].items()
    state = {f"{number}.{key}": value for number, values in states for key, value in values.items()}
    for name, tensors in ((WEIGHTS, weights_of(modules)), (OPTIMISER, state)):
        save_file({key: tensor.detach().contiguous().cpu() for key, tensor in tensors.items()}, fresh / name)
    if progress.best_step == progress.step and progress.best is not None:
        shutil.copyfile(fresh / WEIGHTS, fresh / BEST)
    elif (folder / BEST).is_file():
        os.link(folder / BEST, fresh / BEST)
    (fresh / META).write_text(json.dumps(asdict(progress)))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path, modules: Mapping[str, nn.Module], optimiser: torch.optim.Optimizer) -> Progress:
    """Loads the checkpoint, if there is one, and returns how far it had come."""
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        os.replace(old, folder)
    if not folder.exists():
        return Progress()
    restore_weights(modules, load_file(folder / WEIGHTS))
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / OPTIMISER).items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    return Progress(**json.loads((folder / META).read_text()))


def restore_best(folder: Path, modules: Mapping[str, nn.Module]) -> None:
    if (folder / BEST).is_file():
        restore_weights(modules, load_file(folder / BEST))
