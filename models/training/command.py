"""Train encoders by a recipe, stage by stage. The same call resumes a run that was stopped.

care train models/training/recipes/tiny.toml                 a first try: a few minutes on two cores
care train models/training/recipes/care-small-zh.toml --out var/runs/care-small-zh
care train RECIPE --dry-run                                  what would be done, what it would take, what is missing
care train RECIPE --curate                                   missing files are made first, by the recipe's commands
care train RECIPE --out DIR --set stages.align.lr=5e-5       a recipe with another value
accelerate launch --num_processes 4 -m cli train RECIPE --out DIR        on four GPUs
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from models.errors import CareError
from models.package import above_zero


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML file (models/training/recipes/)")
    parser.add_argument("--out", type=Path, help="folder of the run: log, checkpoints, encoders (var/runs/RECIPE)")
    parser.add_argument(
        "--vectors", type=Path, help="folder for vectors of frozen encoders, which runs may share (OUT/vectors)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the recipe")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda or cpu (default: the GPU if there is one)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and what it takes, and train nothing")
    parser.add_argument("--curate", action="store_true", help="make missing files by the recipe's care curate commands")
    parser.add_argument("--tflops", type=above_zero, default=100.0, help="speed for --dry-run (%(default)s)")


def run(arguments: Namespace) -> None:
    from models.training.recipe import Recipe

    recipe = Recipe.load(arguments.recipe, arguments.set)
    if arguments.dry_run:
        from models.training.plan import plan

        print(plan(recipe, tflops=arguments.tflops))
        return
    out = arguments.out or Path("var/runs") / arguments.recipe.stem
    if arguments.curate:
        from models.training.sources import make

        make(recipe, out)
    from safetensors import SafetensorError

    from models.training.monitor import CURVES_FILE
    from models.training.ranks import Ranks
    from models.training.run import PAIRS, train

    ranks = Ranks.join(arguments.device)
    try:
        folders = train(recipe, out, ranks, arguments.vectors)
    except SafetensorError as error:  # it hides that the disk is full
        raise CareError(f"{out}: {error}; free some space, then run the same command again") from error
    if not ranks.is_first:
        return
    if (out / CURVES_FILE).is_file():
        print(f"{out / CURVES_FILE}: loss and development figures")
    for folder in folders:
        use = f"care export {folder} TARGET makes it ready to serve"
        if folder.name in recipe.generators:
            use = "any server of chat models serves it"
        elif recipe.encoders[folder.name].beside is not None:
            use = f"care index build CORPUS --encoder {folder} reads documents with it"
        print(f"{folder}: {use}")
    if not folders:
        last = [name for name, stage in recipe.stages.items() if not stage.skip][-1]
        print(f"{out / last / PAIRS}: rows for the `files` of a recipe")
