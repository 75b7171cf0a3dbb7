"""The dry run: table 17 of the paper, published parameter counts, and no weights loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cli import main
from models.errors import CareError
from models.training.plan import cost_of, plan
from models.training.recipe import Recipe
from models.training.shapes import check, shape_of
from tests.support.toy_training import write_gguf

RECIPES = Path("models/training/recipes").resolve()


def section(text: str, stage: str) -> str:
    return text.partition(f"stage {stage}:")[2].partition("\n\n")[0]


def speed(text: str) -> float:
    return float(re.findall(r"speed about ([\d.,]+) rows/s", text)[0].replace(",", ""))


def hours(text: str) -> float:
    return float(re.findall(r"([\d.,]+) h on one card", text)[0].replace(",", ""))


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_the_plan_prints_table_17(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPES / f"care-0.3b-{size}.toml"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    table = {
        "retromae": ("2e-4", "0", "384", "3 epochs"),
        "unsupervised": ("1e-4", "0.05", "19,200", "3 epochs"),
        "query": ("1e-4", "0.05", "640", "1 epochs"),
        "document": ("1e-4", "0.05", "640", "1 epochs"),
        "align": ("1e-4", "0.05", "2,560", "1 epochs"),
        "joint": ("1e-4", "0.05", "640", "1 epochs"),
    }
    for stage, (rate, warmup, batch, epochs) in table.items():
        found = section(text, stage)
        assert f"peak learning rate {rate}, warm-up {warmup}, linear schedule, AdamW" in found
        assert f"global batch {batch}, {epochs}" in found
    assert "LoRA rank 32, alpha 64" in text
    assert "1 x InfoNCE + 1 x MSE" in section(text, "align")
    assert "table 17's 2 epochs" in section(text, "query")
    precision = "fp16" if size == "4b" else "bf16"
    assert precision in section(text, "joint")


def test_the_plan_names_the_teacher_and_the_margin_by_which_it_drops_negatives() -> None:
    """A recipe over care-pair that sets `distil` to 0 keeps the margin, and with it the teacher."""
    text = plan(Recipe.load(RECIPES / "care-pair.toml", ["stages.document.loss.distil=0.0"]), tflops=100)
    found = section(text, "document")
    assert "distillation" not in found
    assert "teacher document, as the stage finds it; a document that it scores 0.05 above the answer is not" in found
    distilled = plan(Recipe.load(RECIPES / "competitors/distill.toml"), tflops=100)
    assert "teacher document, as the stage finds it\n" in section(distilled, "align")
    assert "teacher" not in section(plan(Recipe.load(RECIPES / "tiny.toml"), tflops=100), "tune")


def test_the_plan_tells_encoders_that_are_trained_from_those_that_are_only_read() -> None:
    text = plan(Recipe.load(RECIPES / "bmretriever.toml"), tflops=100)
    assert re.search(r"both +data/weights/gemma-2b: 2\.51B parameters, [\d.]+M trained \(LoRA rank 16", text)
    assert re.search(r"finder +data/weights/e5-base: [\d.]+M parameters, only read, mean pooling", text)
    untuned = plan(
        Recipe.load(RECIPES / "bmretriever.toml", ["stages.pretrain.skip=true", "stages.instruct.skip=true"]),
        tflops=100,
    )
    assert re.search(r"both +data/weights/gemma-2b: 2\.51B parameters, only read, eos pooling", untuned)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("encoders.both.fresh.tokenizer='README.md'", "README.md: not a tokenizer"),
        ("stages.pretrain.data.files=['EMPTY']", "EMPTY: no rows to train with"),
    ],
)
def test_what_no_stage_can_begin_with_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    given = ["--set", setting.replace("EMPTY", str(empty))]
    assert main(["train", str(RECIPES / "tiny.toml"), "--dry-run", *given]) == 1
    assert message.replace("EMPTY", str(empty)) in capsys.readouterr().err


@pytest.mark.parametrize("tflops", ["0", "nan", "-1"])
def test_a_speed_must_be_above_zero(tflops: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", str(RECIPES / "tiny.toml"), "--dry-run", "--tflops", tflops])
    assert f"argument --tflops: '{tflops}' is not" in capsys.readouterr().err


def test_the_plan_prints_rates_and_minutes_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where none of the recipe's data is
    changes = ["stages.tune.minutes=2.5", "stages.document.lr=2.25e-5"]
    text = plan(Recipe.load(RECIPES / "care-pair.toml", changes), tflops=100)
    assert "peak learning rate 2.25e-5," in section(text, "document")
    assert "peak learning rate 1.5e-4," in section(text, "tune")
    assert "1037 steps or 2.5 minutes," in section(text, "tune")
    whole, read = re.findall(r"([\d.]+) h on one card, ([\d.]+) h of it", section(text, "tune"))[0]
    assert float(whole) - float(read) == pytest.approx(2.5 / 60, abs=0.011), "not the hours of all steps"


def test_parameters_are_those_of_the_published_models() -> None:
    recipe = Recipe.load(RECIPES / "care-0.3b-4b.toml")
    query, document = cost_of(recipe, "query"), cost_of(recipe, "document")
    assert query is not None
    assert document is not None
    assert query.whole == pytest.approx(305e6, rel=0.01)
    assert document.whole == pytest.approx(4.02e9, rel=0.01)
    # 36 layers: q and o 2560 ↔ 4096, k and v 2560 → 1024, gate, up and down 2560 ↔ 9728; rank 32.
    widths = 2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728)
    assert document.trained == 36 * 32 * widths


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(path: Path) -> None:
    recipe = Recipe.load(path)
    text = plan(recipe, tflops=100)
    for name, stage in recipe.stages.items():
        assert f"stage {name}: {stage.kind}" in text
        assert ("skipped" in section(text, name)) == stage.skip
    assert "not known" not in text


def test_hours_are_estimated_from_the_existing_rows(toy_recipe: Callable[..., Recipe]) -> None:
    text = plan(toy_recipe(), tflops=1)
    assert re.search(r"about 12 rows, [\d.]+ h on one card$", text)
    # A GPU so slow that hours have digits, and one so fast that rows per second do.
    slow, fast = (plan(toy_recipe(steps=None, epochs=2.0), tflops=tflops) for tflops in (1e-9, 1.0))
    assert hours(slow) == pytest.approx(12 * 2 / 3600 / (speed(fast) * 1e-9), rel=0.01)
    assert "none.jsonl not there yet" in plan(
        toy_recipe(steps=None, epochs=1.0, data={"files": ["none.jsonl"]}), tflops=1
    )


def test_the_plan_counts_the_batches_of_each_source(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> None:
    rows = [{"query": f"q{n} {s}", "pos": ["d"], "source": f"s{s}"} for s in range(20) for n in range(5)]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {"files": [str(tmp_path / "many.jsonl")]}
    assert "about 100 rows, 20 steps, " in plan(toy_recipe(steps=None, epochs=1.0, batch=10, data=data), tflops=1)


def test_a_frozen_encoder_reads_each_text_once(toy_recipe: Callable[..., Recipe]) -> None:
    data = {"files": toy_recipe().stages["tune"].data.files, "view": "texts"}
    frozen = {"document": "document", "batch": 1, "data": data}  # no batch needs texts of the next epoch to be full
    once, thrice = (plan(toy_recipe(steps=None, epochs=epochs, **frozen), tflops=1e-9) for epochs in (1.0, 3.0))
    (reading,) = re.findall(r"([\d.]+) h of it for what is frozen", once)
    assert f"{reading} h of it for what is frozen" in thrice
    assert hours(thrice) - float(reading) == pytest.approx(3 * (hours(once) - float(reading)), rel=0.01)
    assert float(reading) > 0


def test_the_shape_of_a_gguf_file_is_read_from_it(tmp_path: Path, toy_recipe: Callable[..., Recipe]) -> None:
    encoder = write_gguf(tmp_path / "any.gguf")
    recipe = toy_recipe(query="document", train=["document"])
    config = recipe.encoders["document"].model_copy(update={"start": tmp_path / "any.gguf"})
    cost = cost_of(recipe.model_copy(update={"encoders": {"document": config}}), "document")
    assert cost is not None
    assert cost.whole == sum(weight.numel() for weight in encoder.parameters())


def test_memory_counts_the_scores_of_a_large_batch(toy_recipe: Callable[..., Recipe]) -> None:
    assert "memory about 0 GiB" in plan(toy_recipe(data={"files": ["none.jsonl"]}), tflops=1)
    # 6 tables of 4 bytes for each of 16,384 x 16,384 scores.
    assert "memory about 6 GiB" in plan(toy_recipe(batch=2**14, data={"files": ["none.jsonl"]}), tflops=1)


def test_memory_counts_the_vocabulary_of_the_reconstruction_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPES / "care-0.3b-4b.toml"), "--dry-run"]) == 0
    # 8,192 tokens, 250,048 words, 12 bytes each are 23 GiB; weights and activations come on top.
    found = re.search(r"memory about (\d+) GiB", section(capsys.readouterr().out, "retromae"))
    assert found is not None
    assert 23 < int(found[1]) < 40


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid_at_its_published_sizes(path: Path) -> None:
    """Uses configurations of the published checkpoints, without weights: widths, lengths, layers, pooling, prompts."""
    recipe = Recipe.load(path)
    assert all(shape_of(recipe, name) is not None for name in recipe.encoders), "an unknown shape is not checked"
    check(recipe)


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("bmretriever", "encoders.finder.dim=2048", r"encoders\.finder: it has 768 dimensions, the recipe 2048; set"),
        ("bmretriever", "encoders.both.dim=768", r"stages\.pretrain: encoders\.both\.dim is 768; .* recipe's 2048"),
        ("care-pair-joined", "encoders.query.dim=512", r"stages\.align: .*query\.dim is 512; .* joined encoders' 1024"),
        ("care-0.3b-4b", "dim=1024", r"encoders\.query: it has 768 dimensions, the recipe 1024"),
        ("care-0.3b-4b", "stages.document.loss.dims=[4096]", "4096 is more than the 2560 dimensions"),
        ("care-0.3b-4b", "encoders.document.pooling=cls", "the first token of a qwen3 sees no other"),
        ("care-0.3b-4b", "stages.retromae.encoder=document", "RetroMAE needs an encoder with a mask token"),
        ("care-0.3b-4b", "encoders.document.instruction=cmedteb", "has no query_instruction; there are cmedteb/"),
        ("care-0.3b-4b", "encoders.document.query_template=Query", "must hold {instruction}"),
        ("care-small-zh", "encoders.both.max_length=600", "max_length 600 is more than"),
        ("competitors/kale", "encoders.student.layers=40", r"encoders\.student\.layers: .* has 36, not 40"),
        ("cardioembed", "encoders.both.lora.targets=['query']", "'query' is not a layer of the backbone; it has down_"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_before_anything_runs(recipe: str, change: str, message: str) -> None:
    with pytest.raises(CareError, match=message):
        plan(Recipe.load(RECIPES / f"{recipe}.toml", [change]), tflops=1)


def test_a_start_that_does_not_say_how_it_is_pooled_is_named_by_the_plan(toy_recipe: Callable[..., Recipe]) -> None:
    recipe = toy_recipe()
    silent = recipe.encoders["query"].model_copy(update={"pooling": None})
    with pytest.raises(CareError, match=r"query does not say how it is pooled .*give pooling cls or mean"):
        check(recipe.model_copy(update={"encoders": recipe.encoders | {"query": silent}}))


def test_a_copy_has_at_most_the_layers_that_training_left(toy_recipe: Callable[..., Recipe]) -> None:
    recipe = toy_recipe(query="document", train=["document"])
    short = recipe.encoders["document"].model_copy(update={"layers": 1})
    later, stage = short.model_copy(update={"start": None, "copy_of": "document", "layers": 2}), recipe.stages["tune"]
    reads = stage.model_copy(update={"query": "later", "train": ["later"]})
    of = {"encoders": {"document": short, "later": later}}
    with pytest.raises(CareError, match=r"encoders\.later\.layers: document has 1, not 2"):
        check(recipe.model_copy(update=of | {"stages": {"tune": stage, "then": reads}}))
    check(recipe.model_copy(update=of | {"stages": {"first": reads, "tune": stage}}))


def test_a_run_folder_is_named_after_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the smallest recipe from the command line on the example corpus, as a newcomer would."""
    for name in ("models", "examples"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    monkeypatch.chdir(tmp_path)
    given = ["train", "models/training/recipes/tiny.toml", "--device", "cpu", "--set", "max_steps=2"]
    assert main([*given, "--set", "stages.*.batch=4"]) == 0
    out = capsys.readouterr().out
    assert "var/runs/tiny/encoders/both: care export var/runs/tiny/encoders/both TARGET" in out
    rows = [json.loads(line) for line in Path("var/runs/tiny/mine/pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 400
    assert all(len(row["neg"]) == 3 for row in rows)
