"""The loop on a tiny model: it learns, resumes to the same weights, and refuses what it should."""

import json
from pathlib import Path

import pytest
import torch

from models.errors import BadData, CareError
from models.export.check_texts import CHECK_TEXTS
from models.spec import Side
from models.torch_encoder import TorchEncoder
from models.training.recipe import Recipe
from models.training.run import blend, schedule, train
from tests.support.tiny_models import tiny_encoder

_KNOWN = sorted({character for text in CHECK_TEXTS for character in text if "一" <= character <= "龥"})
TOPICS = ["".join(_KNOWN[row : row + 3]) for row in range(0, 24, 3)]


def a_recipe(folder: Path, **changes: object) -> Recipe:
    tiny_encoder("bert").save(folder / "start")
    rows = [
        {"query": f"{topic}怎么办", "pos": [f"{topic}的治疗和护理"], "neg": ["无关"], "source": f"s{row % 2}"}
        for row, topic in enumerate(TOPICS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    facts = {
        "start": folder / "start",
        "space": "trained",
        "data": {"files": [folder / "pairs.jsonl"], "query_tokens": 16, "document_tokens": 24, "crops": {"s0": 0.5}},
        "batch": {"size": 4, "leaf": 2},
        "loss": {"distil": 0.5, "lexical_share": 0.5, "false_negative_margin": 0.5},
        "optimiser": {"steps": 6, "lr": 1e-3},
        "checkpoint_every": 2,
    }
    return Recipe.model_validate(facts | changes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(TorchEncoder.load(folder).state_dict())


def test_a_run_stopped_and_resumed_reaches_the_same_weights(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    whole = train(recipe, tmp_path / "whole", device="cpu")
    assert train(recipe, tmp_path / "parts", device="cpu", until=3) is None
    parts = train(recipe, tmp_path / "parts", device="cpu")
    assert whole is not None
    assert parts is not None
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=0, atol=0)


def test_the_encoder_carries_the_recipes_space_and_the_log_every_loss(tmp_path: Path) -> None:
    folder = train(a_recipe(tmp_path), tmp_path / "run", device="cpu")
    assert folder is not None
    assert TorchEncoder.load(folder).spec.space == "trained"
    last = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 6
    assert last["loss"] == pytest.approx(last["info_nce"] + 0.5 * last["distil"], rel=1e-5)


def test_training_brings_pairs_together(tmp_path: Path) -> None:
    data = {"files": [tmp_path / "pairs.jsonl"], "hard_negatives": 0}
    recipe = a_recipe(tmp_path, data=data, optimiser={"steps": 60, "lr": 1e-3}, loss={"temperature": 0.1})
    folder = train(recipe, tmp_path / "run", device="cpu")
    assert folder is not None

    def margin(encoder: TorchEncoder) -> float:
        queries = encoder.encode([f"{topic}怎么办" for topic in TOPICS], Side.QUERY)
        documents = encoder.encode([f"{topic}的治疗和护理" for topic in TOPICS], Side.DOCUMENT)
        scores = queries @ documents.T
        return float(scores.diagonal().mean() - scores.mean())

    assert margin(TorchEncoder.load(folder)) > margin(TorchEncoder.load(tmp_path / "start")) + 0.1


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path: Path) -> None:
    train(a_recipe(tmp_path), tmp_path / "run", device="cpu", until=2)
    with pytest.raises(CareError, match="another recipe"):
        train(a_recipe(tmp_path, seed=9), tmp_path / "run", device="cpu")


def test_a_blend_lies_between_start_and_student() -> None:
    student, start = tiny_encoder("bert", seed=1), tiny_encoder("bert", seed=2)
    name = "backbone.embeddings.word_embeddings.weight"
    expected = 0.25 * student.state_dict()[name] + 0.75 * start.state_dict()[name]
    blend(student, start, 0.25)
    torch.testing.assert_close(student.state_dict()[name], expected)


def test_the_learning_rate_rises_then_falls() -> None:
    shares = [schedule(step, 100, 0.1) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == pytest.approx(1)
    assert shares[-1] == pytest.approx(1 / 90)
    assert sorted(shares[10:], reverse=True) == shares[10:]


@pytest.mark.parametrize(
    ("text", "message"),
    [("start = ", "not TOML"), ("start = 'x'", "data: Field required"), ("colour = 1", "recipe.toml: ")],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(BadData, match=message):
        Recipe.load(tmp_path / "recipe.toml")
    with pytest.raises(BadData, match="no such recipe"):
        Recipe.load(tmp_path / "none.toml")


def test_every_bundled_recipe_is_valid() -> None:
    recipes = list(Path("models/training/recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        Recipe.load(path)
