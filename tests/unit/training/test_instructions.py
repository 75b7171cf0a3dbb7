"""What stands before a query in training: a row's instruction, the encoder's own, or what the recipe says."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.encoder.spec import Side
from models.encoder.torch import TorchEncoder
from models.training.encoders import EncoderStore
from models.training.recipe import Recipe
from models.training.run import train
from models.training.texts import Texts
from models.training.vectors import read_once
from tests.support.toy_training import ONE, QUERIES

Make = Callable[..., Recipe]
GIVEN = Texts(Side.QUERY, QUERIES, ["找出答案"] * len(QUERIES))


def with_own(recipe: Recipe, instruction: str | None) -> Recipe:
    change = {"query_instruction": instruction}
    encoders = {name: encoder.model_copy(update=change) for name, encoder in recipe.encoders.items()}
    return recipe.model_copy(update={"encoders": encoders})


@pytest.mark.parametrize(("own", "counts"), [(None, True), ("问：", False), ("", False)])
def test_a_query_instruction_of_the_recipe_replaces_those_of_rows_for_a_frozen_encoder(
    tmp_path: Path, toy_recipe: Make, own: str | None, counts: bool
) -> None:
    """As for E5, which reads "query: " before every query and mines negatives for rows with instructions."""
    store = EncoderStore(with_own(toy_recipe(), own), tmp_path / "run", ONE)
    vectors = np.asarray(read_once("document", GIVEN, store, tmp_path, precision="fp32"))
    bare = np.asarray(read_once("document", Texts(Side.QUERY, QUERIES), store, tmp_path, precision="fp32"))
    assert np.allclose(vectors, bare) is not counts


@pytest.mark.parametrize(("own", "counts"), [(None, True), ("问：", False)])
def test_a_query_instruction_of_the_recipe_replaces_those_of_rows_for_a_trained_encoder(
    tmp_path: Path, toy_recipe: Make, own: str | None, counts: bool
) -> None:
    trained = []
    for name in ("given", "bare"):
        recipe = with_own(toy_recipe(steps=1), own)
        file = tmp_path / "rows.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        changed = [row | ({"instruction": "找出答案"} if name == "given" else {}) for row in rows]
        file.write_text("".join(f"{json.dumps(row)}\n" for row in changed))
        (folder,) = (folder for folder in train(recipe, tmp_path / name, ONE) if folder.name == "query")
        trained.append(TorchEncoder.load(folder).encode(QUERIES, Side.QUERY))
    assert np.allclose(*trained) is not counts
