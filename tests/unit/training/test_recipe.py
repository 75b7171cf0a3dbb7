from pathlib import Path

import pytest

from models.errors import BadData
from models.training.recipe import Recipe
from models.training.stages import Contrast, files_of

RECIPES = sorted(Path("models/training/recipes").rglob("*.toml"))
CARE = Path("models/training/recipes/care-0.3b-4b.toml")
WHOLE = """
about = "a"
space = "s"
dim = 4
[encoders.e]
start = "here"
[stages.one]
kind = "contrast"
query = "e"
train = ["e"]
data = { files = ["f"] }
batch = 2
steps = 3
lr = 1e-3
"""


DATA = WHOLE.replace("data = {", 'data.files = ["f"] #')
MINE = '[stages.mine]\nkind = "mine"\nfiles = ["f"]\nquery = "e"\n'


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def stage(recipe: Recipe, name: str) -> Contrast:
    found = recipe.stages[name]
    assert isinstance(found, Contrast)
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_bundled_recipe_is_valid(path: Path) -> None:
    assert Recipe.load(path).about


def test_recipes_share_a_space_only_with_the_pair_whose_documents_they_search() -> None:
    spaces = {path.stem: Recipe.load(path).space for path in RECIPES}
    for_the_pair = {name for name in spaces if name.startswith("pair-")}
    assert for_the_pair
    assert {spaces.pop(name) for name in for_the_pair} == {spaces["care-pair"]}
    assert len(set(spaces.values())) == len(spaces)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dim = ", "not TOML"),
        ("dim = 4", "about: Field required"),
        (WHOLE.replace('query = "e"', 'query = "x"'), "no encoder is called 'x'"),
        (WHOLE + "epochs = 1", "either epochs or steps"),
        (WHOLE + "colour = 1", "stages.one.colour: no such key; models/training/{recipe,stages}.py"),
        (WHOLE + "bach = 1", r"stages.one.bach: no such key; did you mean batch\?"),
        (WHOLE + "loss = { info_nce = 0.0 }", "stages.one.loss: every term has weight 0"),
        (WHOLE + "[stages.two]\nlr = 1", "stages.two: a stage needs a kind"),
        (WHOLE + '[encoders.f]\ncopy_of = "g"', "encoders.f.copy_of: 'g' is not an encoder"),
        (WHOLE.replace("lr = 1e-3", "lr = { f = 1e-3 }"), "stages.one.lr: 'f' is not trained"),
        (WHOLE.replace('train = ["e"]', 'train = ["f"]'), "stages.one.train: 'f' reads nothing"),
        (WHOLE.replace('files = ["f"]', 'files = ["@two"]'), "stages.one: @two: no stage before this one writes"),
        (WHOLE.replace("stages.one", "stages.vectors"), "'vectors' is a folder of every run"),
        (WHOLE.replace("batch = 2", "batch = 1" + "0" * 15), "stages.one.batch: Input should be less than or equal to"),
        ("seed = -1\n" + WHOLE, "seed: Input should be greater than or equal to 0"),
        (WHOLE + "skip = true", "every stage is skipped: set skip of one to false"),
        (DATA + "data.crop_units = [10, 4]", "stages.one.data: crop_units: write the fewest units first"),
        (DATA + 'data.crops = { "*" = nan }', r"stages.one.data.crops.\*: Input should be"),
        (DATA + "data.crops = { s = -1.0 }", "stages.one.data.crops.s: Input should be greater than or equal to 0"),
        (DATA + "data.weights = { s = inf }", "stages.one.data.weights.s: Input should be a finite number"),
        (WHOLE + MINE + "ranks = [20, 10]", "stages.mine: ranks: write the first rank that counts"),
        (WHOLE + MINE + "margin = nan", "stages.mine.margin: Input should be a finite number"),
        (WHOLE.replace('start = "here"', ""), "give one of start, copy_of and fresh"),
        (WHOLE.replace('start = "here"', 'start = "here"\nbits = 8'), "bits is for the base under lora"),
        (
            WHOLE.replace('start = "here"', 'start = "here"\nlora = { rank = 1, alpha = 1 }') + "average = 0.5",
            "stages.one.average: 'e' is trained by lora",
        ),
    ],
)
def test_an_error_of_a_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadData, match=message):
        Recipe.load(write(tmp_path, text))


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"no such recipe; give the path .*/recipes has .* tiny\.toml"):
        Recipe.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("base", "message"),
    [('"over.toml"', "recipe.toml: base: these recipes lie over each other"), ("5", "name one recipe")],
)
def test_a_base_that_leads_nowhere_is_named(tmp_path: Path, base: str, message: str) -> None:
    write(tmp_path, 'base = "recipe.toml"', "over.toml")
    with pytest.raises(BadData, match=message):
        Recipe.load(write(tmp_path, f"base = {base}"))


def test_a_recipe_can_extend_another_one(tmp_path: Path) -> None:
    write(tmp_path, WHOLE, "base.toml")
    mine = '[stages.two]\nkind = "mine"\nquery = "e"\nfiles = ["g"]'
    over = f'base = "base.toml"\ndim = 2\n[stages.one]\nlr = 0.5\n{mine}'
    recipe = Recipe.load(write(tmp_path, over))
    assert list(recipe.stages) == ["one", "two"]
    assert (recipe.dim, stage(recipe, "one").lr, stage(recipe, "one").batch) == (2, 0.5, 2)


def test_keys_can_be_changed_from_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    recipe = Recipe.load(path, ["stages.one.lr=0.25", "space=other", "stages.*.batch=7", "stages.*.epochs=1", "dim=3"])
    assert (recipe.space, recipe.dim, stage(recipe, "one").lr, stage(recipe, "one").batch) == ("other", 3, 0.25, 7)
    assert stage(recipe, "one").epochs is None, "a star changes only existing keys"
    with pytest.raises(BadData, match="write KEY=VALUE"):
        Recipe.load(path, ["dim"])
    with pytest.raises(BadData, match=r"stages\.\*\.btach: no such key; did you mean batch"):
        Recipe.load(path, ["stages.*.btach=7"])
    with pytest.raises(BadData, match=r"stages\.once\.lr: stages has no once, only one"):
        Recipe.load(path, ["stages.once.lr=1"])
    with pytest.raises(BadData, match="dim is not a table"):
        Recipe.load(path, ["dim.x=1"])


def test_an_ablation_changes_what_its_name_says() -> None:
    whole = Recipe.load(CARE)
    folder = CARE.parent / "ablations"
    assert stage(Recipe.load(folder / "without-mse.toml"), "align").loss.mse == 0
    assert stage(Recipe.load(folder / "without-contrast.toml"), "align").loss.info_nce == 0
    assert stage(whole, "align").loss.mse == stage(whole, "align").loss.info_nce == 1
    skipped = {
        "without-query-init": {"retromae", "unsupervised", "query"},
        "without-document-init": {"document"},
        "without-align": {"align"},
        "without-joint": {"joint"},
    }
    for name, expected in skipped.items():
        recipe = Recipe.load(folder / f"{name}.toml")
        assert {stage for stage, settings in recipe.stages.items() if settings.skip} == expected


def test_an_ablation_of_bmretriever_changes_what_its_name_says() -> None:
    def files(name: str) -> set[str]:
        read = (file for each in ("mine", "instruct") for file in files_of(found(name).stages[each]))
        return {Path(file).stem for file in read}

    def found(name: str) -> Recipe:
        return Recipe.load(CARE.parent / "ablations" / f"bmretriever-{name}.toml")

    whole = Recipe.load(CARE.parent / "bmretriever-410m.toml")
    synthetic = {"consistent", "triples"}
    biomedical = {"stackexchange", "mednli", "mqp", "medquad", "healthcaremagic"}
    general = {"eli5", "gooaq", "msmarco", "nq", "nli", "fever"}
    everything = {"@mine"} | synthetic | biomedical | general
    assert {Path(file).stem for name in ("mine", "instruct") for file in files_of(whole.stages[name])} == everything
    for name, left in (("synthetic", synthetic), ("biomedical", biomedical), ("general", general)):
        assert files(f"without-{name}") == everything - left
    assert {Path(file).stem for file in files_of(found("unsupervised").stages["instruct"])} == synthetic
    assert found("unsupervised").stages["mine"].skip
    assert {name for name, each in found("without-tuning").stages.items() if each.skip} == {"mine", "instruct"}
    assert {name for name, each in found("without-pretraining").stages.items() if each.skip} == {"pretrain"}
    for name in ("pretrain", "instruct"):
        assert stage(found("cosine"), name).loss.model_dump() == stage(whole, name).loss.model_dump() | {
            "similarity": "cosine"
        }
    assert stage(found("tenth-tuning"), "instruct").epochs == 0.1
    assert files_of(found("tenth-pretraining").stages["pretrain"]) == ["data/biomedical/tenth.jsonl"]
    assert stage(found("crops"), "pretrain").data == stage(whole, "pretrain").data.model_copy(
        update={"halves": {"*": 1}}
    )
    bare = found("without-instructions")
    assert stage(bare, "pretrain") == stage(whole, "pretrain")
    assert (stage(bare, "instruct").query, stage(bare, "instruct").train) == ("plain", ["plain"])
    changed = {
        "start": None,
        "instruction": None,
        "copy_of": "both",
        "query_instruction": "",
        "document_instruction": "",
    }
    assert bare.encoders["plain"] == whole.encoders["both"].model_copy(update=changed)
