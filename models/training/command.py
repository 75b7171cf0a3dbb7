"""Train an encoder by a recipe. The same call goes on where a stopped run left off.

care train models/training/recipes/care-small-zh.toml --out var/runs/care-small-zh
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from models.training.recipe import Recipe


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a TOML file (models/training/recipes/)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run: log, checkpoint, encoder")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda or cpu (default: the GPU if there is one)")


def run(arguments: Namespace) -> None:
    from models.training.run import train

    folder = train(Recipe.load(arguments.recipe), arguments.out, device=arguments.device)
    print(f"{folder}: trained; care export {folder} TARGET makes it ready to serve")
