"""The training loop: gradients, clip, step, log, judge, checkpoint.

A step depends on the recipe and its number alone; so a stage that was stopped or killed ends in the same weights. A
checkpoint is written beside the old one and replaces it by renames: a kill leaves one of them whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.errors import CareError
from models.training.contrast import OBJECTIVE
from models.training.encoders import restore_trained, trained_weights
from models.training.monitor import DevSets, Watch
from models.training.ranks import Ranks
from models.training.recipe import Contrast, Reconstruct
from models.training.tables import Texts

CHECKPOINT = "checkpoint"


class Stopped(CareError):
    """Someone asked the run to stop, and it did, after saving."""

    exit_code = 130


class Work(Protocol):
    """What the loop needs of a stage."""

    steps: int

    @property
    def modules(self) -> Mapping[str, nn.Module]: ...

    def gradients(self, step: int, scale: Callable[[Tensor], Tensor]) -> dict[str, float]: ...

    def vectors_of(self, texts: Texts) -> Tensor: ...

    def write(self, folder: Path) -> None: ...


def run(
    work: Work, settings: Contrast | Reconstruct, name: str, folder: Path, ranks: Ranks, dev: DevSets | None
) -> None:
    """All steps of a stage from where it stopped; afterwards the weights are the last, or the best by the dev sets."""
    home = folder / name / CHECKPOINT
    optimiser = make_optimiser(work.modules, settings)
    progress = restore(home, work.modules, optimiser)
    half = settings.precision == "fp16" and ranks.device.type == "cuda"
    scaler = torch.amp.GradScaler(ranks.device.type, enabled=half, init_scale=progress.scale or 2.0**16)
    with Watch(folder, name, progress.step, work.steps, ranks) as watch, _Ear() as ear:
        for step in range(progress.step, work.steps):
            share = schedule(step, work.steps, settings.warmup, settings.schedule)
            facts = _step(work, settings, step, share, optimiser, scaler, ranks)
            done = step + 1
            # Half precision skips a step now and then, at a smaller scale each time; below 1 it has skipped them all.
            if scaler.get_scale() < 1 if half else not math.isfinite(facts["gradient_norm"]):
                raise CareError(
                    f"{name}: the gradient of step {done} is not finite: try another precision or a lower learning "
                    "rate, in another --out"
                )
            watch.step(done, facts, lr=max(group["lr"] for group in optimiser.param_groups))
            progress = replace(progress, step=done, scale=scaler.get_scale() if half else None)
            judged = dev is not None and (done % dev.every == 0 or done == work.steps)
            if judged:
                progress = _judge(work, dev, progress, watch, ranks)
            if done in settings.snapshots and ranks.is_first:
                work.write(folder / name / f"at-{done}")
            stopped = ranks.any(ear.stop)
            if stopped or done % settings.checkpoint_every == 0 or done == work.steps or progress.best_step == done:
                if ranks.is_first:
                    save(home, work.modules, optimiser, progress)
                ranks.wait()
            if stopped:
                raise Stopped(
                    f"stopped after step {done} of {work.steps} of {name}; the same command goes on from there"
                )
    if dev is not None:
        restore_best(home, work.modules)


def _step(
    work: Work,
    settings: Contrast | Reconstruct,
    step: int,
    share: float,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    ranks: Ranks,
) -> dict[str, float]:
    for group in optimiser.param_groups:
        group["lr"] = group["peak"] * share
    optimiser.zero_grad(set_to_none=True)
    facts = work.gradients(step, scaler.scale)
    _add_up(work.modules, ranks)
    scaler.unscale_(optimiser)
    trained = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(trained, settings.clip)
    scaler.step(optimiser)
    scaler.update()
    return facts | {"gradient_norm": float(norm)}


def _add_up(modules: Mapping[str, nn.Module], ranks: Ranks) -> None:
    """Sums gradients over the ranks; the objective's own are whole on each, for each computes the whole loss."""
    if ranks.size == 1:
        return
    for name, module in modules.items():
        for parameter in module.parameters() if name != OBJECTIVE else ():
            if parameter.requires_grad:
                parameter.grad = ranks.sum(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def _judge(work: Work, dev: DevSets | None, progress: Progress, watch: Watch, ranks: Ranks) -> Progress:
    assert dev is not None
    # Two cards may round otherwise; what follows must be the same on all.
    figure = ranks.of_first(dev.figure(work.vectors_of))
    watch.log({"step": progress.step, "dev": figure, "metric": dev.metric})
    better = progress.best is None or figure > progress.best
    watch.say(f"step {progress.step}: {dev.metric} {figure:.2f}{', the best so far' if better else ''}")
    return replace(progress, best=figure, best_step=progress.step) if better else progress


def make_optimiser(modules: Mapping[str, nn.Module], settings: Contrast | Reconstruct) -> torch.optim.AdamW:
    """AdamW; vectors and scalars are not decayed. A module that no rate is named for takes the highest."""
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


class _Ear:
    """Hears Ctrl-C and a request to end, once; the step is finished first. A second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.stop = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.stop and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop = True
        # Not print: the signal may have come in the middle of one.
        os.write(2, b"\nstops after this step, which is saved; a second Ctrl-C ends at once\n")


META, WEIGHTS, OPTIMISER, BEST = "meta.json", "weights.safetensors", "optimiser.safetensors", "best.safetensors"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage has come."""

    step: int = 0
    """Steps that are done."""
    best: float | None = None
    """The best development figure so far, and the step after which it was reached."""
    best_step: int | None = None
    scale: float | None = None
    """The loss scale of half precision."""


def weights_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Trained weights of several modules, by `module/weight`."""
    return {
        f"{name}/{key}": value for name, module in modules.items() for key, value in trained_weights(module).items()
    }


def restore_weights(modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> None:
    for name, module in modules.items():
        prefix = f"{name}/"
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        restore_trained(module, own)


def save(folder: Path, modules: Mapping[str, nn.Module], optimiser: torch.optim.Optimizer, progress: Progress) -> None:
    """Replaces the checkpoint. The best weights come along: from the modules if this step is the best, else as they
    were."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(_on_cpu(weights_of(modules)), fresh / WEIGHTS)
    save_file(_on_cpu(_optimiser_state(optimiser)), fresh / OPTIMISER)
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
    """Loads the checkpoint, if there is one, and says how far it had come."""
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        os.replace(old, folder)
    if not folder.exists():
        return Progress()
    restore_weights(modules, load_file(folder / WEIGHTS))
    _restore_optimiser(optimiser, load_file(folder / OPTIMISER))
    return Progress(**json.loads((folder / META).read_text()))


def restore_best(folder: Path, modules: Mapping[str, nn.Module]) -> None:
    if (folder / BEST).is_file():
        restore_weights(modules, load_file(folder / BEST))


def _optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    return {f"{number}.{key}": value for number, values in state.items() for key, value in values.items()}


def _restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
