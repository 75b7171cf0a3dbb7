"""What a stage needs to go on: trained weights, optimiser state, step, the best so far; no pickle.

A checkpoint is written beside the old one and takes its place by renames: a kill leaves one of them whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.training.encoders import restore_trained, trained_weights

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
