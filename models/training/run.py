"""A run: the stages of a recipe in order, each handing its encoders to the next as folders.

The folder of a run holds `recipe.json`, `log.jsonl`, a folder for each stage (checkpoint, then the encoders that it
trained or the pairs that it wrote), `vectors/` of frozen encoders, `curves.png`, and at the end `encoders/`. The same
recipe in the same folder goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from models.errors import BadData, CareError
from models.training import loop
from models.training.contrast import ContrastStage
from models.training.dev import DevSets
from models.training.encoders import Shelf
from models.training.mining import diversify, filter_pairs, mine
from models.training.progress import draw_curves
from models.training.ranks import Ranks
from models.training.recipe import AnyStage, Contrast, Diversify, Filter, Mine, Recipe, Reconstruct
from models.training.reconstruct import ReconstructStage

DONE, PAIRS = "done.json", "pairs.jsonl"
RECIPE_FILE, VECTORS, ENCODERS = "recipe.json", "vectors", "encoders"


def train(recipe: Recipe, folder: Path, ranks: Ranks) -> list[Path]:
    """Runs what is not done yet; returns the encoder folders, in the order of the recipe."""
    _claim(folder, recipe, ranks)
    if ranks.device.type == "cuda":
        # cuDNN's attention was seen giving NaN gradients on padded batches.
        torch.backends.cuda.enable_cudnn_sdp(False)
    shelf = Shelf(recipe, folder, ranks.device)
    dev = DevSets.load(recipe.dev) if recipe.dev is not None else None
    trained: dict[str, None] = {}
    for name, stage in recipe.stages.items():
        if stage.skip:
            continue
        done = folder / name / DONE
        if not done.is_file():
            facts = _run_stage(recipe, name, stage, folder, shelf, ranks, dev)
            if ranks.is_first:
                done.write_text(json.dumps(facts))
                shutil.rmtree(folder / name / loop.CHECKPOINT, ignore_errors=True)
            ranks.wait()
        for encoder in _trained_by(stage):
            shelf.replace(encoder, folder / name / encoder)
            trained[encoder] = None
    return _publish(folder, shelf, list(trained), ranks)


def _run_stage(
    recipe: Recipe,
    name: str,
    stage: AnyStage,
    folder: Path,
    shelf: Shelf,
    ranks: Ranks,
    dev: DevSets | None,
) -> dict[str, int]:
    home, vectors = folder / name, folder / VECTORS
    home.mkdir(parents=True, exist_ok=True)
    named = stage.data.files if isinstance(stage, Contrast | Reconstruct) else stage.files
    files = [_resolve(file, folder) for file in named]
    if isinstance(stage, Mine):
        return mine(recipe, stage, files, shelf, vectors, ranks, home / PAIRS)
    if isinstance(stage, Filter):
        return filter_pairs(recipe, stage, files, shelf, vectors, ranks, home / PAIRS)
    if isinstance(stage, Diversify):
        return diversify(recipe, stage, files, shelf, vectors, ranks, home / PAIRS)
    work: ContrastStage | ReconstructStage
    if isinstance(stage, Contrast):
        work = ContrastStage(recipe, stage, files, shelf, vectors, ranks)
    else:
        work = ReconstructStage(recipe, stage, files, shelf, ranks)
    loop.run(work, stage, name, folder, ranks, dev if isinstance(stage, Contrast) else None)
    if ranks.is_first:
        work.keep(home)
    ranks.wait()
    return {"steps": work.steps}


def _trained_by(stage: AnyStage) -> list[str]:
    if isinstance(stage, Contrast):
        return list(dict.fromkeys(stage.train))
    return [stage.encoder] if isinstance(stage, Reconstruct) else []


def _resolve(file: str, folder: Path) -> Path:
    """A file of the recipe: a path, or "@NAME" for the pairs that a stage wrote."""
    if not file.startswith("@"):
        return Path(file)
    path = folder / file[1:] / PAIRS
    if not path.is_file():
        raise BadData(f"{file}: no stage before this one wrote pairs under that name")
    return path


def _claim(folder: Path, recipe: Recipe, ranks: Ranks) -> None:
    """A folder belongs to one recipe."""
    facts = recipe.model_dump(mode="json")
    path = folder / RECIPE_FILE
    if path.is_file():
        if json.loads(path.read_text(encoding="utf-8")) != facts:
            raise CareError(f"{folder} belongs to another recipe: choose another --out, or delete it to start anew")
    elif ranks.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(facts, ensure_ascii=False, indent=2), encoding="utf-8")
    ranks.wait()


def _publish(folder: Path, shelf: Shelf, trained: list[str], ranks: Ranks) -> list[Path]:
    """`encoders/NAME` are links to what the last stage of each encoder left."""
    home = folder / ENCODERS
    if ranks.is_first:
        home.mkdir(exist_ok=True)
        for name in trained:
            link = home / name
            link.unlink(missing_ok=True)
            link.symlink_to(Path("..") / shelf.folder(name).relative_to(folder))
        draw_curves(folder)
    ranks.wait()
    return [home / name for name in trained]
