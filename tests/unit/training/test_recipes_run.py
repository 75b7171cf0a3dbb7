"""Every recipe file, stage by stage, at toy size; the result is exported, indexed and searched."""

import json
from pathlib import Path

import pytest

from indexer.build import BuildOptions, build
from indexer.encode import Encoder
from indexer.store.collection import Collection
from indexer.store.snapshot import Snapshot
from models.encoder.onnx import OnnxEncoder, OnnxReranker
from models.encoder.packed.joined import open_packed
from models.encoder.spec import Side, Variant
from models.export.parity import FLOORS, Floor
from models.export.pipeline import Backend, export
from models.export.reranker import export_reranker
from models.training.recipe import Recipe
from models.training.run import train
from models.training.stages import Contrast, Rerank, TrainedStage, files_of
from tests.support.toy_training import (
    DOCUMENTS,
    ONE,
    QUERIES,
    plain,
    toy_rows,
    toy_tokenizer,
    write_chat_start,
    write_dev,
    write_gguf,
    write_rows,
    write_start,
)

FOLDER = Path("models/training/recipes").resolve()
RECIPES = sorted(FOLDER.rglob("*.toml"))
# Sizes that a test can afford, unless a recipe sets others.
TOY = [
    "dim=32",
    "max_steps=1",
    "dev.every=1",
    "stages.*.batch=4",
    "stages.*.tokens=1000",
    "stages.*.loss.dims=[64,32]",
    "encoders.*.max_length=32",
    "encoders.*.projection=80",
    "encoders.*.dim=16",
    "encoders.*.layers=1",
    "encoders.*.query_instruction=问：",
    "encoders.*.document_instruction=文：",
    "stages.*.data.weights={toy = 2.0}",
    "stages.*.data.crops={toy = 1.0}",
    "stages.*.data.without=[]",
    "stages.*.sample={toy = 1.0}",
    "stages.*.halves={toy = 0.5}",
]
ARCHITECTURES = {
    "gte": "new",
    "bge": "bert",
    "care": "bert",
    "e5": "bert",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "pythia": "gpt_neox",
    "biomistral": "qwen3",
    "embeddinggemma": "qwen3",
}


def depth(recipe: Recipe) -> int:
    """Layers of the encoders that the recipe starts with: two if it takes some of them away."""
    return 2 if any(encoder.layers is not None for encoder in recipe.encoders.values()) else 1


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes data/weights of all recipes, in a folder for each depth."""
    homes = tmp_path_factory.mktemp("weights")
    for path in RECIPES:
        recipe = Recipe.load(path)
        home = homes / str(depth(recipe))
        for name, encoder in recipe.encoders.items():
            if encoder.start is None or (home / encoder.start.name).exists():
                continue
            if name in recipe.generators:
                write_chat_start(home / encoder.start.name)
            elif encoder.start.suffix == ".gguf":
                write_gguf(home / encoder.start.name)
            else:
                family = encoder.start.name.lower().partition("-")[0]
                write_start(home / encoder.start.name, ARCHITECTURES[family], layers=depth(recipe))
                if family == "embeddinggemma":  # with mean pooling it needs a token even for an empty text
                    toy_tokenizer().save(str(home / encoder.start.name / "tokenizer.json"))
    return homes


def write_data(recipe: Recipe) -> None:
    """Writes every file that the recipe names; hypothetical documents if they belong to the method."""
    rows = toy_rows() if recipe.space == "sl-hyde" else plain(toy_rows())
    for stage in recipe.stages.values():
        for file in files_of(stage):
            if not file.startswith("@"):
                write_rows(Path(file), rows)
    if recipe.dev is not None:
        write_dev(recipe.dev.folder)


def exported(folder: Path, target: Path) -> OnnxEncoder:
    floors = {Variant.FP32: Floor(FLOORS[Variant.FP32].cosine, FLOORS[Variant.FP32].worst_cosine, top10_overlap=0.0)}
    export(folder, target, variants=[Variant.FP32], backend=Backend.TORCH, floors=floors)
    return OnnxEncoder.load(target, threads=1)


@pytest.mark.usefixtures("few_check_texts")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_and_its_result_searches(
    path: Path, starts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    home = starts / str(depth(Recipe.load(path)))
    Path("data/weights").symlink_to(home)
    Path("data/encoders").symlink_to(home)
    Path("models").symlink_to(FOLDER.parents[1])
    changes = [change for change in TOY if change.partition(".")[0] != "dev" or "[dev]" in path.read_text()]
    # On a CPU without bf16, fp32 takes half of the time: only the recipes that set a dtype keep it.
    changes += ["encoders.*.dtype=fp32"] if "dtype" not in path.read_text() else []
    # The prompt of a chat is longer than the texts of encoders, and each byte is a token here.
    changes += [f"encoders.{name}.max_length=400" for name in Recipe.load(path).generators]
    recipe = Recipe.load(path, changes)
    for joined in (name for name, encoder in recipe.encoders.items() if encoder.beside is not None):
        recipe = Recipe.load(path, [*changes, f"encoders.query.dim={recipe.dim_of(joined)}"])
    write_data(recipe)
    folders = {folder.name: folder for folder in train(recipe, Path("run"), ONE)}
    stages = {name: stage for name, stage in recipe.stages.items() if not stage.skip}
    assert all(Path("run", name, "done.json").is_file() for name in stages)
    if not folders:
        assert Path("run", list(stages)[-1], "pairs.jsonl").read_text()
        return
    logged = {json.loads(line)["stage"] for line in Path("run/log.jsonl").read_text().splitlines()}
    assert logged == {name for name, stage in stages.items() if isinstance(stage, TrainedStage)}
    if isinstance(last := list(stages.values())[-1], Rerank):
        report = export_reranker(folders[last.encoder], tmp_path / "reranker", variants=[Variant.FP32])
        reranker = OnnxReranker.load(report.folder, threads=1)
        assert reranker.score(reranker.tokenizer.pairs(QUERIES[0], DOCUMENTS)).shape == (len(DOCUMENTS),)
        return
    last = [stage for stage in stages.values() if isinstance(stage, Contrast)][-1]
    query = exported(folders[last.query], tmp_path / "query")
    reader = last.document or last.query
    document: Encoder = query
    if reader != last.query:
        joined = recipe.encoders[reader].beside is not None  # no graph is made of two encoders
        document = open_packed(folders[reader]) if joined else exported(folders[reader], tmp_path / "document")
    corpus = write_rows(Path("corpus.jsonl"), [{"_id": f"d{n}", "text": text} for n, text in enumerate(DOCUMENTS)])
    collection = Collection(tmp_path / "collection")
    snapshot = Snapshot.open(build([corpus], document, collection, BuildOptions(overlap=4)).folder)
    assert snapshot.manifest.space == query.spec.space == recipe.space
    scores, rows = snapshot.vectors.search(query.encode(QUERIES, Side.QUERY), k=3)
    assert rows.shape == (len(QUERIES), 3)
    assert (scores[:, 0] >= scores[:, 2]).all()
