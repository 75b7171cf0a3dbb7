"""Runs the stages of a recipe in order; each passes its encoders to the next as folders.

The folder of a run holds `recipe.json`, `log.jsonl`, a folder for each stage (checkpoint, then the encoders that it
trained or the pairs that it wrote), `vectors/` of frozen encoders, `curves.png`, and at the end `encoders/`. The same
recipe in the same folder resumes where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models.errors import BadData, CareError
from models.training import loop
from models.training.contrast import ContrastStage
from models.training.encoders import EncoderStore
from models.training.generate import GenerateStage
from models.training.mining import mine
from models.training.monitor import DevSets, draw_curves
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.reconstruct import ReconstructStage
from models.training.rerank import RerankStage
from models.training.shapes import check
from models.training.sources import DONE, how_to_get, until_tuned
from models.training.stages import AnyStage, Contrast, Mine, Rerank, encoders_of, files_of, trained_by
from models.training.tables import SCRATCH

WORKS: dict[str, Callable[..., Any]] = {
    "contrast": ContrastStage, "reconstruct": ReconstructStage, "rerank": RerankStage, "generate": GenerateStage
}  # fmt: skip
PAIRS = "pairs.jsonl"
RECIPE_FILE, ENCODERS = "recipe.json", "encoders"


def train(recipe: Recipe, folder: Path, ranks: Ranks, vectors: Path | None = None) -> list[Path]:
    """Runs what is not done yet; returns the encoder folders: those that were trained, then one that was only read.

    `vectors` is where those of frozen encoders are kept, if not in the folder of the run.
    """
    dev = DevSets.load(recipe.dev) if recipe.dev is not None else None
    store = EncoderStore(recipe, folder, ranks, vectors)
    if ranks.is_first:
        _claim(folder, store)
    ranks.wait()
    with _held(folder, ranks):
        return _run_stages(recipe, folder, ranks, store, dev)


def _run_stages(recipe: Recipe, folder: Path, ranks: Ranks, store: EncoderStore, dev: DevSets | None) -> list[Path]:
    if ranks.device.type == "cuda":
        # cuDNN's attention was seen giving NaN gradients on padded batches.
        torch.backends.cuda.enable_cudnn_sdp(False)
    trained: dict[str, None] = {}
    for name, stage in recipe.stages.items():
        if stage.skip:
            continue
        store.hold(recipe.read_by(stage))
        done = folder / name / DONE
        if not done.is_file():
            if ranks.is_first:
                print(f"stage {name}: {stage.kind}", file=sys.stderr)
            _require_files(recipe, name, stage)
            facts = _run_stage(store, name, stage, folder, dev)
            if ranks.is_first:
                print(f"stage {name}: {', '.join(f'{n:,} {what}' for what, n in facts.items())}", file=sys.stderr)
                done.write_text(json.dumps(facts))
                for used in (loop.CHECKPOINT, SCRATCH):
                    shutil.rmtree(folder / name / used, ignore_errors=True)
            torch.cuda.empty_cache()  # what a large stage held is free for other programs while a small one runs
            ranks.wait()
        for encoder in trained_by(stage):
            store.replace(encoder, folder / name / encoder)
            trained[encoder] = None
    if ranks.is_first:
        draw_curves(folder)
    return _publish(folder, store, list(trained))


@contextmanager
def _held(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Refuses a second process that would train in the same folder."""
    with ExitStack() as stack:
        if ranks.is_first:
            held = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, held)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CareError(f"{folder}: another process trains there; wait for it, or end it") from error
        yield


def _run_stage(store: EncoderStore, name: str, stage: AnyStage, folder: Path, dev: DevSets | None) -> dict[str, int]:
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    # A file of the recipe is a path, or "@NAME" for the pairs that a stage wrote.
    files = [folder / file[1:] / PAIRS if file.startswith("@") else Path(file) for file in files_of(stage)]
    if isinstance(stage, Mine):
        return mine(store, stage, files[: len(stage.files)], home / PAIRS, files[len(stage.files) :])
    work = WORKS[stage.kind](store, stage, files, home / SCRATCH)
    judged = isinstance(stage, Contrast) or (isinstance(stage, Rerank) and stage.first is not None)
    judge = loop.Judge(dev.every, dev.metric, partial(work.figure, dev)) if dev is not None and judged else None
    steps = loop.run(work, stage, name, folder, store.ranks, judge)
    if store.ranks.is_first:
        work.keep(home)
    store.ranks.wait()
    return {"steps": steps}


def _claim(folder: Path, store: EncoderStore) -> None:
    """Makes the folder belong to this recipe, unless it is another's or something is missing."""
    facts, path = store.recipe.model_dump(mode="json", exclude={"files", "checksums"}), folder / RECIPE_FILE
    if path.is_file():
        other = _difference(json.loads(path.read_text(encoding="utf-8")), facts)
        if other is not None:
            raise CareError(
                f"{folder} belongs to another recipe ({other}): choose another --out, or delete it to start anew"
            )
    _look_ahead(folder, store)
    folder.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(facts, ensure_ascii=False, indent=2), encoding="utf-8")
    fresh.replace(path)


def _look_ahead(folder: Path, store: EncoderStore) -> None:
    """Reports what is missing before the first stage, not hours later; GGUF files are unpacked once, here."""
    check(store.recipe)
    recipe, ready = store.recipe, set[str]()
    for name, stage in until_tuned(recipe, folder).items():
        if not (folder / name / DONE).is_file():
            _require_files(recipe, name, stage)
    for name, stage in recipe.stages.items():
        if stage.skip:
            continue
        if not (folder / name / DONE).is_file():
            for encoder in encoders_of(stage):
                if encoder not in ready and recipe.encoders[encoder].copy_of not in ready:
                    without_spec = encoder in recipe.rerankers | recipe.generators
                    store.folder(encoder) if without_spec else store.spec(encoder)
        ready.update(trained_by(stage))


def _require_files(recipe: Recipe, name: str, stage: AnyStage) -> None:
    for file in files_of(stage):
        if not file.startswith("@") and not Path(file).is_file():
            how = how_to_get(recipe, file) if file in recipe.files else "put the rows there, or name another file"
            raise BadData(f"stages.{name}: {file} is not there; {how}")


def _difference(there: object, here: object, key: str = "") -> str | None:
    """Returns the first key in which two recipes differ, with both values; None where there is none."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*here, *(name for name in there if name not in here)]
        parts = (_difference(there.get(name), here.get(name), f"{key}.{name}".lstrip(".")) for name in keys)
        return next((part for part in parts if part is not None), None)
    return None if there == here else f"{key} is {json.dumps(there)} there, {json.dumps(here)} here"


def _publish(folder: Path, store: EncoderStore, trained: list[str]) -> list[Path]:
    """`encoders/NAME` are links to what the last stage of each trained encoder left, and copies of others.

    The others are those that the last contrast reads: what was trained is of no use without them. A query encoder
    whose documents have two encoders is written anew, in fewer dimensions.
    """
    recipe = store.recipe
    read = [name for s in recipe.last_contrast for name in (s.query, s.document) if name and name not in trained]
    home = folder / ENCODERS
    if store.ranks.is_first:
        home.mkdir(exist_ok=True)
        for name in (name for name in trained if name not in recipe.folded):
            (home / name).unlink(missing_ok=True)
            (home / name).symlink_to(Path("..") / store.folder(name).relative_to(folder))
        if not all((home / name).is_dir() for name in (*read, *recipe.folded)):
            tensors = next((store.fold(name, home / name) for name in recipe.folded), None)
            for name in read:
                store.copy(name, home / name, tensors)
    store.ranks.wait()
    return [home / name for name in (*trained, *read)]
