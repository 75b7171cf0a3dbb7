"""Trains variants of a recipe, each with several seeds, and judges them: a paper's table by one command.

  python -m models.training.study models/training/studies/care-tables.toml DATA/cmirb DATA/chip-cdn --out OUT

The same call goes on after a stop. OUT holds a folder for each run (with `log`), `vectors/` of frozen encoders, which
the runs share, and `table.md`: means over the seeds, and their standard deviation.

A study is a TOML file with these keys:
  base        a recipe, relative to the study's folder
  seeds       numbers; each variant is trained once with each
  documents   what reads documents: an encoder of the recipe, or FOLDER,precision=bf16 as `care eval` takes it
  variants    tables of recipes, which lie over the base; `documents` among them counts for this variant
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from models.errors import BadData, CareError
from models.evaluation.judge import judge
from models.evaluation.lineup import Lineup, Wanted
from models.evaluation.sets import Task, find_tasks
from models.progress import Progress
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.recipe_file import Tables, overlaid, read_tables
from models.training.run import ENCODERS, train

FIGURES, LOG, TABLE, VECTORS, CACHE = "figures.json", "log", "table.md", "vectors", "cache"
DOCUMENTS = "documents"
Figures = dict[str, float]
FolderName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]


class Study(BaseModel):
    """What a study's file says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    documents: str
    seeds: list[int] = Field(min_length=1)
    variants: dict[FolderName, Tables] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise BadData(f"{path}: {error}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            raise BadData(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error


@dataclass(frozen=True, slots=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    recipe: Recipe
    documents: str
    folder: Path

    def pair(self) -> tuple[str, str]:
        """Returns what reads queries and documents, as `care eval` takes them."""
        (last,) = self.recipe.last_contrast
        own = self.documents in self.recipe.encoders
        return self._address(last.query), self._address(self.documents) if own else self.documents

    def _address(self, name: str) -> str:
        device, precision = ("cuda", "bf16") if torch.cuda.is_available() else ("cpu", "fp32")
        joined = self.recipe.encoders[name].beside is not None
        return f"{self.folder / ENCODERS / name},{f'precision={precision}' if joined else f'device={device}'}"


def runs_of(path: Path, out: Path) -> list[Run]:
    """Reads a study, and every recipe in it, before the first one is trained."""
    study = Study.load(path)
    base, found = read_tables(path.parent / study.base), []
    for variant, tables in study.variants.items():
        changes = {key: value for key, value in tables.items() if key != DOCUMENTS}
        for seed in study.seeds:
            recipe = Recipe.of(overlaid(base, changes | {"seed": seed}), f"{path}: {variant}")
            if not recipe.last_contrast:
                raise BadData(f"{path}: {variant}: no stage trains a query encoder, so there is nothing to judge")
            documents = str(tables.get(DOCUMENTS, study.documents))
            found.append(Run(variant, seed, recipe, documents, out / variant / str(seed)))
    return found


def _train(run: Run, vectors: Path) -> None:
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / LOG).open("a", encoding="utf-8") as log, redirect_stderr(log):
        train(run.recipe, run.folder, Ranks.join(), vectors)


def _judge(run: Run, tasks: Sequence[Task], cache: Path) -> Figures:
    """Returns the figures of a run's pair on these sets; those of an earlier call are kept."""
    path = run.folder / FIGURES
    known: Figures = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if missing := [task for task in tasks if task.name not in known]:
        with ExitStack() as stack:
            wanted = Wanted(pairs=[run.pair()], bm25=False, hybrid=False)
            systems = Lineup(wanted, cache, stack, lambda count: None).systems
            known |= {result.set_name: result.value for result in judge(missing, systems).results}
        path.write_text(json.dumps(known), encoding="utf-8")
    return {task.name: known[task.name] for task in tasks}


def table(found: dict[str, list[Figures]]) -> str:
    """Returns means over seeds with their standard deviations, as Markdown: a line for each variant."""
    sets = list(next(iter(found.values()))[0])
    lines = [f"| | seeds | average | {' | '.join(sets)} |", f"|---|{'---:|' * (len(sets) + 2)}"]
    for variant, figures in found.items():
        columns = [[float(np.mean(list(each.values()))) for each in figures]]
        columns += [[each[name] for each in figures] for name in sets]
        spread = [f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "" for values in columns]
        cells = [f"{np.mean(values):.2f}{each}" for values, each in zip(columns, spread, strict=True)]
        lines.append(f"| {variant} | {len(figures)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def study(path: Path, roots: Sequence[Path], out: Path, at_once: int = 1) -> str:
    """Trains and judges what is not done yet; returns the table. A run that fails does not stop the others."""
    tasks = [task for root in roots for task in find_tasks(root)]
    if len(names := {task.name for task in tasks}) < len(tasks):
        raise BadData(f"two sets have one name among {', '.join(sorted(names))}: judge them by two calls")
    runs, failed, found = runs_of(path, out), list[str](), dict[tuple[str, int], Figures]()
    context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
    with ProcessPoolExecutor(at_once, context) as pool, Progress("train", "runs", len(runs)) as bar:
        trained = {pool.submit(_train, run, out / VECTORS): run for run in runs}
        for future in as_completed(trained):
            run = trained[future]
            try:
                future.result()
                figures = found[run.variant, run.seed] = _judge(run, tasks, out / CACHE)
                bar.write(f"{run.variant}, seed {run.seed}: {np.mean(list(figures.values())):.2f}")
            except (CareError, RuntimeError) as error:  # torch raises RuntimeError, also where memory runs out
                failed.append(f"{run.variant}, seed {run.seed}: {error} ({run.folder / LOG})")
                bar.write(failed[-1])
            bar.update()
    judged = {r.variant: [found[key] for key in found if key[0] == r.variant] for r in runs}
    text = table({variant: figures for variant, figures in judged.items() if figures}) if found else ""
    (out / TABLE).write_text(text + "\n", encoding="utf-8")
    if failed:
        raise CareError(f"{len(failed)} of {len(runs)} runs failed; the same call tries them again\n{text}")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    about, _, usage = str(__doc__).partition("\n")
    form, name = RawDescriptionHelpFormatter, "python -m models.training.study"
    parser = ArgumentParser(name, description=about, epilog=usage, formatter_class=form)
    parser.add_argument("study", type=Path, help="a TOML file (models/training/studies/)")
    parser.add_argument("sets", type=Path, nargs="+", help="folders of evaluation sets, as care eval takes them")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the table")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs that share the machine (%(default)s)")
    given = parser.parse_args(arguments)
    try:
        print(study(given.study, given.sets, given.out, given.at_once))
    except CareError as error:
        sys.exit(f"study: {error}")


if __name__ == "__main__":
    main()
