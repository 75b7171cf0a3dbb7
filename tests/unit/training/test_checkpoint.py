"""Checkpoints: saved atomically, and complete for resuming."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from models.training import loop as checkpoint
from models.training.loop import Progress


def trained(steps: int) -> tuple[dict[str, nn.Module], torch.optim.Optimizer]:
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {"a": nn.Linear(3, 2), "b": nn.Linear(2, 1)}
    optimiser = torch.optim.AdamW([value for module in modules.values() for value in module.parameters()], lr=0.1)
    for step in range(steps):
        advance(modules, optimiser, step)
    return modules, optimiser


def advance(modules: dict[str, nn.Module], optimiser: torch.optim.Optimizer, step: int) -> None:
    optimiser.zero_grad()
    modules["b"](modules["a"](torch.full((4, 3), float(step + 1)))).square().sum().backward()
    optimiser.step()


def assert_same(first: dict[str, nn.Module], second: dict[str, nn.Module]) -> None:
    for name, value in checkpoint.weights_of(first).items():
        torch.testing.assert_close(checkpoint.weights_of(second)[name], value, rtol=0, atol=0)


def test_a_restored_run_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    modules, optimiser = trained(3)
    checkpoint.save(tmp_path / "c", modules, optimiser, Progress(step=3, best=1.5, best_step=2, scale=8.0))
    others, other = trained(0)
    assert checkpoint.restore(tmp_path / "c", others, other) == Progress(3, 1.5, 2, 8.0)
    assert_same(modules, others)
    advance(modules, optimiser, 3)
    advance(others, other, 3)
    assert_same(modules, others)


def test_without_a_checkpoint_a_stage_starts_from_the_beginning(tmp_path: Path) -> None:
    modules, optimiser = trained(1)
    assert checkpoint.restore(tmp_path / "none", modules, optimiser) == Progress()


def test_the_best_weights_are_kept_when_later_ones_are_worse(tmp_path: Path) -> None:
    modules, optimiser = trained(1)
    checkpoint.save(tmp_path / "c", modules, optimiser, Progress(step=1, best=9.0, best_step=1))
    best = {name: value.clone() for name, value in checkpoint.weights_of(modules).items()}
    for step in (1, 2):
        advance(modules, optimiser, step)
        checkpoint.save(tmp_path / "c", modules, optimiser, Progress(step=step + 1, best=9.0, best_step=1))
    checkpoint.restore_best(tmp_path / "c", modules)
    for name, value in checkpoint.weights_of(modules).items():
        torch.testing.assert_close(value, best[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "moment", ["before the old one is moved", "between the moves", "before the old one is removed"]
)
def test_a_kill_during_saving_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules, optimiser = trained(1)
    checkpoint.save(tmp_path / "c", modules, optimiser, Progress(step=1))
    advance(modules, optimiser, 1)
    moves = iter({"before the old one is moved": 0, "between the moves": 1}.get(moment, 2) * [True])
    plain, remove = checkpoint.os.replace, shutil.rmtree

    def replace(source: Path, target: Path) -> None:
        if not next(moves, False):
            raise KeyboardInterrupt
        plain(source, target)

    def rmtree(path: Path, **named: bool) -> None:
        if path.name.endswith(".old") and path.exists():
            raise KeyboardInterrupt
        remove(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", replace)
        patch.setattr(checkpoint.shutil, "rmtree", rmtree)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path / "c", modules, optimiser, Progress(step=2))
    found = checkpoint.restore(tmp_path / "c", *trained(0))
    assert found.step == (2 if moment == "before the old one is removed" else 1)
    checkpoint.save(tmp_path / "c", modules, optimiser, Progress(step=3))
    assert checkpoint.restore(tmp_path / "c", *trained(0)).step == 3
