"""What a run needs to go on: weights, optimiser state, step. Written whole or not at all; no pickle is trusted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from models.errors import CareError
from models.torch_encoder import TorchEncoder
from models.training.recipe import Recipe

META, WEIGHTS, OPTIMISER = "meta.json", "weights.safetensors", "optimiser.pt"


def save(folder: Path, recipe: Recipe, student: TorchEncoder, optimiser: torch.optim.Optimizer, step: int) -> None:
    """Replaces the checkpoint; a kill at any moment leaves the old one or the new one."""
    fresh = folder.with_name(folder.name + ".new")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in student.state_dict().items()}, fresh / WEIGHTS)
    torch.save(optimiser.state_dict(), fresh / OPTIMISER)
    (fresh / META).write_text(json.dumps({"step": step, "recipe": recipe.model_dump(mode="json")}, indent=2))
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path, recipe: Recipe, student: TorchEncoder, optimiser: torch.optim.Optimizer) -> int:
    """Loads the checkpoint, if there is one, and returns the step to go on with."""
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        os.replace(old, folder)
    if not folder.exists():
        return 0
    meta = json.loads((folder / META).read_text())
    if meta["recipe"] != recipe.model_dump(mode="json"):
        raise CareError(f"{folder} belongs to another recipe: choose another --out, or delete it to start anew")
    student.load_state_dict(load_file(folder / WEIGHTS, device=str(next(student.parameters()).device)))
    optimiser.load_state_dict(torch.load(folder / OPTIMISER, weights_only=True))
    return int(meta["step"])
