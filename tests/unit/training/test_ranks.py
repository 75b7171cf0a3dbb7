"""Two processes end with the weights of one: batches are shared, negatives and gradients are exchanged."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from loadtest.harness.servers import free_port
from models.encoder.spec import Side
from models.encoder.torch import TorchEncoder
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.run import train
from tests.support.toy_training import DOCUMENTS, ONE, recipe_toml, write_dev, write_gguf

ROOT = Path.cwd()


def test_one_process_is_a_run_of_one_rank() -> None:
    one = Ranks.join("cpu")
    assert (one.rank, one.size, one.is_first) == (0, 1, True)
    assert one.share(3).tolist() == [0, 1, 2]
    assert one.any(True)
    assert not one.any(False)


def test_the_first_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.add_(7.25))
    assert Ranks(1, 2, torch.device("cpu")).of_first(5.0) == 7.25


def test_one_rank_knows_its_own_value_without_asking_the_device() -> None:
    assert Ranks(0, 1, torch.device("meta")).of_first(5.0) == 5.0  # a tensor there has no value


def test_two_processes_reach_the_weights_of_one(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> None:
    """Mines negatives with a GGUF encoder; trains stage I with it and another, frozen; then both sides."""
    write_gguf(tmp_path / "toy.gguf")
    recipe = toy_recipe(
        document="document",
        train=["query", "document"],
        loss={"temperature": 0.1, "learnable": True, "mse": 0.0},
        steps=4,
        batch=5,
    )
    align = recipe.stages["tune"].model_dump() | {"train": ["query"], "loss": {"mse": 1.0, "temperature": 0.1}}
    align |= {"query": "wide", "document": "joined", "train": ["wide"]}
    # Without dropout: each process draws its own.
    path = tmp_path / "query" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    mine = {"kind": "mine", "query": "document", "files": align["data"]["files"], "count": 2}
    joint = recipe.stages["tune"].model_dump() | {"data": {"files": ["@mine"], "negatives": 1}}
    write_dev(tmp_path / "dev")
    values = recipe.model_dump() | {"stages": {"mine": mine, "align": align, "tune": joint}}
    values["dev"] = {"folder": tmp_path / "dev", "every": 4}
    values["encoders"]["document"]["start"] = tmp_path / "toy.gguf"
    values["encoders"]["small"] = values["encoders"]["query"] | {}
    values["encoders"]["wide"] = values["encoders"]["query"] | {"projection": 64, "dim": 64}
    beside = {"copy_of": "document", "start": None, "beside": {"encoder": "small", "share": 0.3}}
    values["encoders"]["joined"] = values["encoders"]["document"] | beside
    recipe = Recipe.model_validate(values)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_toml(recipe))
    expected = train(Recipe.load(path), tmp_path / "one", ONE)
    _launch([sys.executable, "-m", "cli", "train", str(path), "--out", str(tmp_path / "two"), "--device", "cpu"])
    for folder in expected:
        # Vectors, not weights: if a gradient is only rounding error (a key's bias), Adam turns it into a whole step.
        ours, theirs = (
            TorchEncoder.load(home).encode(DOCUMENTS, Side.DOCUMENT)
            for home in (folder, tmp_path / "two" / "encoders" / folder.name)
        )
        np.testing.assert_allclose(theirs, ours, atol=1e-3)
    logs = [
        [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()] for run in ("one", "two")
    ]
    ours, theirs = ([line["loss"] for line in log if "loss" in line] for log in logs)
    assert len(ours) == 4
    assert theirs == pytest.approx(ours, rel=1e-4)
    # The figure is not compared: a rounding error can swap two documents.
    assert [["dev" in line for line in log] for log in logs] == 2 * [[False, False, True] * 2]


def _launch(command: list[str]) -> None:
    """Starts two processes like `accelerate launch`: through variables of their environment."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common = os.environ | shared | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
