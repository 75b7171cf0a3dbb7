"""Trains variants of a recipe, each with several seeds, and judges them: a paper's table by one command.

  python -m models.training.study models/training/studies/care-tables.toml DATA/cmirb DATA/chip-cdn --out OUT

The same call goes on after a stop; other data need another OUT. OUT has `runs/VARIANT/SEED` (with `log`), `vectors/` of
frozen encoders, which the runs share, and `table.md`, which grows with every run: means over the seeds, and their
standard deviation. All variants are trained with one seed, then with the next.

A study is a TOML file with these keys:
  base        a recipe, relative to the study's folder
  seeds       numbers; each variant is trained once with each
  documents   what reads documents: an encoder of the recipe, or FOLDER,precision=bf16 as `care eval` takes it
  variants    tables of recipes, which lie over the base; `base` and `documents` among them count for this variant
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import tomllib
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from models.encoder.spec import SPEC_FILE, EncoderSpec
from models.errors import BadData, CareError
from models.evaluation.encoders import OPTIONS, Address
from models.evaluation.judge import check_libraries, judge
from models.evaluation.lineup import Lineup, LineupOptions
from models.evaluation.sets import Kind, Task, find_tasks
from models.progress import Progress
from models.training.ranks import Ranks
from models.training.recipe import Recipe
from models.training.recipe_file import Tables, overlaid, read_tables
from models.training.run import ENCODERS, train

LOG, TABLE, RUNS, VECTORS, CACHE = "log", "table.md", "runs", "vectors", "cache"
BASE, DOCUMENTS, SEED = "base", "documents", "seed"
Figures = dict[str, float]
FolderName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w-]*$")]
Seed = Annotated[int, Field(ge=0, strict=True)]
# Each run has a process of its own, so one that is killed takes no other with it. A forked one could not use the GPU.
SPAWN = multiprocessing.get_context("spawn")


class Study(BaseModel):
    """Content of a study's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str
    documents: str
    seeds: list[Seed] = Field(min_length=1)
    variants: dict[FolderName, Tables] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            study = cls.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadData(f"{path}: {error}") from error
        except ValidationError as error:
            fault = error.errors()[0]
            raise BadData(f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error
        if len(set(study.seeds)) < len(study.seeds):
            raise BadData(f"{path}: seeds: one is given twice")
        if own := next((name for name, tables in study.variants.items() if SEED in tables), None):
            raise BadData(f"{path}: variants.{own}.{SEED}: the study's seeds count; leave it out")
        return study


@dataclass(frozen=True, slots=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    recipe: Recipe
    documents: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    def pair(self) -> tuple[str, str]:
        """Returns what reads queries and documents, as `care eval` takes them."""
        (last,) = self.recipe.last_contrast
        if self.documents not in self.recipe.encoders:
            return self._address(last.query), self.documents
        return self._address(last.query), self._address(self.documents)

    def _address(self, name: str) -> str:
        device, precision = ("cuda", "bf16") if torch.cuda.is_available() else ("cpu", "fp32")
        joined = self.recipe.encoders[name].beside is not None
        return f"{self.folder / ENCODERS / name},{f'precision={precision}' if joined else f'device={device}'}"

    def check(self) -> None:
        """Refuses, before training, a recipe whose result could not be judged."""
        if not self.recipe.last_contrast:
            raise BadData(f"{self}: no stage trains a query encoder, so there is nothing to judge")
        (last,) = self.recipe.last_contrast
        if self.documents in self.recipe.encoders:
            if self.documents not in {last.query, last.document}:
                raise BadData(f"{self}: {DOCUMENTS}: the last stage does not read with {self.documents}")
            return
        folder = Path(Address.parse(self.documents, OPTIONS).place)
        if not folder.is_dir():
            raise BadData(f"{self}: {DOCUMENTS}: {self.documents} is neither an encoder of the recipe nor a folder")
        if (folder / SPEC_FILE).is_file() and (space := EncoderSpec.load(folder).space) != self.recipe.space:
            raise BadData(f"{self}: {DOCUMENTS}: {folder} is of space {space}, the recipe's is {self.recipe.space}")


def runs_of(path: Path, out: Path) -> list[Run]:
    """Reads a study, and every recipe in it, before the first one is trained.

    The first seed of all variants comes first, so that a study that is stopped has compared them.
    """
    study = Study.load(path)
    found = []
    for seed in study.seeds:
        for variant, tables in study.variants.items():
            changes = {key: value for key, value in tables.items() if key not in (BASE, DOCUMENTS)}
            base = read_tables(path.parent / str(tables.get(BASE, study.base)))
            recipe = Recipe.of(overlaid(base, changes | {SEED: seed}), f"{path}: {variant}")
            documents = str(tables.get(DOCUMENTS, study.documents))
            found.append(Run(variant, seed, recipe, documents, out / RUNS / variant / str(seed)))
    return found


def _train(run: Run, vectors: Path) -> None:
    """Trains in a separate process, which writes to `log` why it failed."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / LOG).open("a", encoding="utf-8", buffering=1) as log, redirect_stderr(log):
        try:
            train(run.recipe, run.folder, Ranks.join(), vectors)
        except CareError as error:
            log.write(f"{error}\n")
            sys.exit(1)
        except Exception:
            traceback.print_exc(file=log)
            raise


def _figures(run: Run, tasks: Sequence[Task], cache: Path) -> Figures:
    """Returns the figures of a run's pair on these sets; vectors are cached."""
    with ExitStack() as stack:
        options = LineupOptions(pairs=[run.pair()], bm25=False, hybrid=False)
        systems = Lineup(options, cache, stack, lambda count: None).systems
        return {result.set_name: result.value for result in judge(tasks, systems).results}


def _judged(run: Run, tasks: Sequence[Task], cache: Path, bar: Progress) -> Figures:
    """Returns the figures of a run; none if it cannot be judged, which must not end the others."""
    try:
        return _figures(run, tasks, cache)
    except CareError as error:
        bar.write(f"{run} cannot be judged: {error}")
        return {}


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
    """Trains what is not trained yet and judges all; returns the table. A run that fails does not stop the others."""
    check_libraries()
    tasks = [task for root in roots for task in find_tasks(root) if task.kind is Kind.RETRIEVAL]
    if not tasks:
        named = ", ".join(map(str, roots))
        raise BadData(f"{named}: no retrieval set to judge by; name folders in BEIR's shape, as care eval takes them")
    if len(names := {task.name for task in tasks}) < len(tasks):
        raise BadData(f"two sets have one name among {', '.join(sorted(names))}: judge them by two calls")
    runs, found, text = runs_of(path, out), dict[str, list[Figures]](), ""
    for run in runs:
        run.check()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadData(f"--out {out}: {error.strerror}; name a folder that can be written") from error
    processes = {run.folder: SPAWN.Process(target=_train, args=(run, out / VECTORS)) for run in runs}

    def trained(run: Run) -> bool:
        process = processes[run.folder]
        process.start()
        process.join()
        return process.exitcode == 0

    with ThreadPoolExecutor(at_once) as pool, Progress("train", "runs", len(runs)) as bar:
        futures = {pool.submit(trained, run): run for run in runs}
        try:
            for future in as_completed(futures):
                run = futures[future]
                if not future.result():
                    bar.write(f"{run} failed: {_last_line(run.folder / LOG)} ({run.folder / LOG})")
                elif figures := _judged(run, tasks, out / CACHE, bar):
                    found.setdefault(run.variant, []).append(figures)
                    text = table({run.variant: found[run.variant] for run in runs if run.variant in found})
                    (out / TABLE).write_text(text + "\n", encoding="utf-8")
                    bar.write(f"{run}: {np.mean(list(figures.values())):.2f}")
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes.values():
                if process.is_alive():
                    process.terminate()  # it saves its step first
            raise
    if missing := len(runs) - sum(map(len, found.values())):
        raise CareError(f"{missing} of {len(runs)} runs failed; the same call tries them again\n{text}".rstrip())
    return text


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return lines[-1] if lines else "it ended without a word"


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    about, _, usage = str(__doc__).partition("\n")
    form, name = RawDescriptionHelpFormatter, "python -m models.training.study"
    parser = ArgumentParser(name, description=about, epilog=usage, formatter_class=form)
    parser.add_argument("study", type=Path, help="a TOML file (models/training/studies/)")
    parser.add_argument("sets", type=Path, nargs="+", help="folders of retrieval sets, as care eval takes them")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the table")
    parser.add_argument("--at-once", type=_positive, default=1, metavar="N", help="runs that share the machine (1)")
    options = parser.parse_args(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the runs save their step
    try:
        print(study(options.study, options.sets, options.out, options.at_once))
    except CareError as error:
        sys.exit(f"study: {error}")
    except KeyboardInterrupt:
        sys.exit("study: stopped; the same call goes on")


if __name__ == "__main__":
    main()
