"""Origins of a recipe's files: every bundled recipe names them, with valid care commands."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import main
from models.errors import BadData
from models.training.recipe import Recipe
from models.training.sources import CURATE, inputs_of, make, missing, parsed, weights
from models.training.stages import Mine, files_of

BMRETRIEVER = Path("models/training/recipes/bmretriever.toml")
WITH_NEGATIVES = {"triple", "labelled", "passages"}
"""Kinds of published records that name what does not answer a query."""
RECIPES = sorted(Path("models/training/recipes").rglob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_dry_run_of_every_recipe_ends_with_the_commands_for_its_files(path: Path) -> None:
    recipe = Recipe.load(path)
    made = set(recipe.files)
    for place, how in recipe.files.items():
        if how.startswith(CURATE):
            assert [name for name in inputs_of(how) if name not in made] == [], place
    lines = missing(recipe)
    assert not [line for line in lines if "does not say" in line]
    commands = [line for line in lines if line.startswith(CURATE)]
    outs = [line.rpartition("--out ")[2] for line in commands]
    for number, line in enumerate(commands):
        later = set(outs[number:])
        assert not later & set(inputs_of(line.partition(" --out ")[0])), "it is made before it is read"


@pytest.mark.parametrize(
    ("recipe", "stage"),
    [
        ("care-0.3b-4b", "document"),
        ("care-0.3b-8b", "joint"),
        ("ablations/query-encoder-undiversified", "query"),
        ("ablations/query-encoder-diverse-queries", "query"),
    ],
)
def test_care_is_tuned_on_graded_rows_and_the_training_rows_of_its_benchmark(recipe: str, stage: str) -> None:
    found = Recipe.load(Path(f"models/training/recipes/{recipe}.toml"))
    (file,) = files_of(found.stages[stage])
    made = [found.files[part] for part in inputs_of(found.files[file])]
    assert [how.removeprefix(CURATE).partition(" ")[0] for how in made] == ["judge", "clean", "synthesize"]
    assert "cmedqa" in made[1]
    assert "--kind synonym" in made[2]


def test_the_negatives_of_sl_hyde_come_from_the_corpus_whose_passages_are_asked_for() -> None:
    """Equation 5: not from those passages alone for which a model wrote a question and a document."""
    recipe = Recipe.load(Path("models/training/recipes/sl-hyde.toml"))
    mine = recipe.stages["mine"]
    assert isinstance(mine, Mine)
    asked = parsed(recipe.files["data/curated/asked.jsonl"], "OUT")
    assert mine.corpus == [str(file) for file in asked.files]
    assert mine.count == 7


def test_cardioembed_has_paraphrases_of_two_models_and_holds_a_tenth_out() -> None:
    files = Recipe.load(Path("models/training/recipes/cardioembed.toml")).files
    asked = [parsed(how, "OUT") for how in files.values() if "--kind paraphrase" in how]
    taken = [parsed(files[str(given.files[0])], "OUT") for given in asked]
    assert len({str(given.models) for given in asked}) == 2
    assert sorted(tuple(given.share) for given in taken) == [(0, 0.45), (0.45, 0.9)]
    assert len({str(given.files) for given in taken}) == 1


def test_bmretriever_queries_have_the_instruction_of_their_corpus() -> None:
    files = Recipe.load(Path("models/training/recipes/bmretriever.toml")).files
    made = [parsed(how, "OUT") for how in files.values() if "--kind query" in how]
    assert len({arguments.instruction for arguments in made} - {None}) == len(made) == 2


def test_bmretriever_mines_a_negative_for_rows_that_come_without_one() -> None:
    formats = tomllib.loads(Path("models/curation/formats.toml").read_text(encoding="utf-8"))
    mine, instruct = (Recipe.load(BMRETRIEVER).stages[name] for name in ("mine", "instruct"))
    mined, own = ({Path(file).stem for file in files_of(stage)} for stage in (mine, instruct))
    assert not mined & own
    labelled = {name for name in mined | own if formats.get(name, {"row": [""]})["row"][0] in WITH_NEGATIVES}
    assert labelled == {"mednli", "mqp", "msmarco", "nq", "nli"}
    assert own == {"@mine", "consistent", "triples", *labelled}
    assert len(mined) == 6


def test_bmretriever_asks_language_models_for_as_much_as_its_paper() -> None:
    files = Recipe.load(BMRETRIEVER).files
    taken = {place: parsed(how, "OUT") for place, how in files.items() if how.startswith("care curate take")}
    rows = {"pubmed": 8_000_000, "meadow": 460_000, "textbooks": 126_000}  # as the recipe describes them
    sizes = {place: given.share[1] * rows[given.files[0].stem] for place, given in taken.items()}
    asked = {
        kind: [parsed(how, "OUT") for how in files.values() if f"--kind {kind}" in how] for kind in ("query", "tasks")
    }
    questions, (tasks,) = sum(sizes[str(given.files[0])] for given in asked["query"]), asked["tasks"]
    assert questions == pytest.approx(500_000, rel=0.02)
    assert sizes[str(tasks.files[0])] * tasks.count == pytest.approx(20_000, rel=0.02)


def test_the_largest_bmretriever_is_pretrained_on_a_million_passages() -> None:
    files = Recipe.load(BMRETRIEVER.with_name("bmretriever-7b.toml")).files
    given = parsed(files["data/biomedical/million.jsonl"], "OUT")
    assert {file.stem for file in given.files} == {
        Path(file).stem for file in files_of(Recipe.load(BMRETRIEVER).stages["pretrain"])
    }
    assert given.share[1] * 11_011_000 == pytest.approx(1_000_000, rel=0.001)  # the sum of table 8


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_gives_checksums_of_its_weights_or_the_reason_for_none(path: Path) -> None:
    recipe = Recipe.load(path)
    lines = weights(recipe)
    assert not [line for line in lines if "does not say" in line]
    assert all("sha256 " in line or "none known: " in line for line in lines)


def test_existing_weights_are_compared_with_the_published_checksums(
    tmp_path: Path, toy_recipe: Callable[..., Recipe]
) -> None:
    folder = tmp_path / "gemma"
    file = folder / "model.safetensors"
    facts = {"files": {str(folder): "hf download google/gemma"}}
    facts["checksums"] = {str(file): hashlib.sha256(b"published").hexdigest()}
    recipe = toy_recipe().model_copy(update=facts)
    (line,) = weights(recipe)
    assert line == f"{file}: sha256 {facts['checksums'][str(file)]}"
    folder.mkdir()
    file.write_bytes(b"published")
    assert weights(recipe) == [f"{line}, as published"]
    file.write_bytes(b"altered")
    assert weights(recipe) == [f"{line}, BUT THE FILE THERE HAS ANOTHER"]
    assert "does not say why" in weights(recipe.model_copy(update={"checksums": {}}))[0]


def test_the_dry_run_prints_checksums_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "models/training/recipes/sl-hyde.toml", "--dry-run"]) == 0
    shown, _, text = capsys.readouterr().out.partition("missing, in the order")
    assert "published weights\n  data/weights/Qwen2-7B-Instruct: no checksum (none known: " in shown
    assert "hf download BAAI/bge-large-zh-v1.5 --local-dir data/weights/bge-large-zh-v1.5" in text
    assert "care curate synthesize data/curated/passages.jsonl --kind query" in text
    assert text.rstrip().endswith("--out data/self-learned.jsonl")


def test_missing_files_are_made_from_existing_ones(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> None:
    raw, clean, once = (str(tmp_path / f"{name}.jsonl") for name in ("raw", "clean", "once"))
    files = {once: f"care curate dedup {clean} --near 0", clean: f"care curate clean {raw}", raw: "pairs"}
    recipe = toy_recipe(data={"files": [once]}).model_copy(update={"files": files})
    assert [line.partition(" ")[0] for line in missing(recipe)] == [f"{raw}:", "care", "care"]
    with pytest.raises(BadData, match=r"bring these first.*\n.*raw\.jsonl: pairs"):
        make(recipe, tmp_path / "run")
    row = json.dumps({"query": "头痛&amp;发热", "pos": ["多喝水多休息"]}, ensure_ascii=False)
    Path(raw).write_text(f"{row}\n{row}\n", encoding="utf-8")
    make(recipe, tmp_path / "run")
    (line,) = Path(once).read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["query"] == "头痛&发热"
    assert missing(recipe) == []
