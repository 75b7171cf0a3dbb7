"""Finds which files and weights a recipe lacks, and how to make them, in order."""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from models.curation import command
from models.encoder.spec import sha256_of
from models.errors import BadData
from models.training.recipe import Recipe
from models.training.stages import AnyStage, Generate, files_of

DONE = "done.json"
"""In the folder of a stage that is done."""
CURATE, DOWNLOAD = "care curate ", "hf download "
SHA256 = re.compile("[0-9a-f]{64}")
MISSING = "missing, in the order in which it can be made:"
INPUTS = ("files", "corpus", "sts", "dictionary", "encoder", "against")
"""The options of curation steps that name files and folders to read."""


def missing(recipe: Recipe) -> list[str]:
    """Returns a command, or words, for each file and folder that the stages of a recipe need and that is not there."""
    stages = {name: stage for name, stage in recipe.stages.items() if not stage.skip}
    return [how_to_get(recipe, place) for place in _lacking(recipe, stages)]


def weights(recipe: Recipe) -> list[str]:
    """Checks for all published weights of a recipe whether the local file is the published one."""
    lines = []
    for place in (place for place, how in recipe.files.items() if how.startswith(DOWNLOAD)):
        known = {file: what for file, what in recipe.checksums.items() if Path(file).is_relative_to(place)}
        for file, what in (known or {place: "the recipe does not say why"}).items():
            if not SHA256.fullmatch(what):
                lines.append(f"{file}: no checksum ({what})")
            elif not Path(file).is_file():
                lines.append(f"{file}: sha256 {what}")
            else:
                same = sha256_of(Path(file)) == what
                lines.append(f"{file}: sha256 {what}, {'as published' if same else 'BUT THE FILE THERE HAS ANOTHER'}")
    return lines


def make(recipe: Recipe, folder: Path) -> None:
    """Runs the curation commands for what the run in the folder needs next; BadData names what the user must add."""
    lacking = list(_lacking(recipe, until_tuned(recipe, folder)))
    if others := [place for place in lacking if not recipe.files.get(place, "").startswith(CURATE)]:
        raise BadData("\n  ".join(["bring these first, then run it again:", *(how_to_get(recipe, p) for p in others)]))
    for place in lacking:
        command.run(parsed(recipe.files[place], place))


def how_to_get(recipe: Recipe, place: str) -> str:
    """Returns the whole command that makes a file or folder, or what the recipe says of it."""
    how = recipe.files.get(place, "the recipe does not say where it comes from")
    if how.startswith(CURATE):
        return f"{how} --out {place}"
    if how.startswith(DOWNLOAD):
        return f"{how} --local-dir {Path(place).parent if Path(place).suffix == '.gguf' else place}"
    return f"{place}: {how}"


def parsed(how: str, out: str) -> Namespace:
    """Returns a curation command as the command line takes it."""
    return _parser().parse_args([*shlex.split(how.removeprefix(CURATE)), "--out", out])


@cache
def _parser() -> ArgumentParser:
    """Takes 20 ms to make, and a plan asks for it dozens of times."""
    parser = ArgumentParser(prog="care curate", exit_on_error=False)
    command.add_arguments(parser)
    return parser


def inputs_of(how: str) -> list[str]:
    """Returns the files and folders that a curation command reads."""
    arguments = parsed(how, "OUT")
    found = []
    for name in INPUTS:
        value = getattr(arguments, name, None) or []
        places = value if isinstance(value, list) else [value]
        found += [str(place).partition(",")[0] for place in places]
    return found


def until_tuned(recipe: Recipe, folder: Path) -> dict[str, AnyStage]:
    """Returns the stages up to the first generator that is not tuned yet: it writes files of those after it."""
    found = {}
    for name, stage in recipe.stages.items():
        if not stage.skip:
            found[name] = stage
            if isinstance(stage, Generate) and not (folder / name / DONE).is_file():
                break
    return found


def _lacking(recipe: Recipe, stages: Mapping[str, AnyStage]) -> Iterator[str]:
    """Yields what is missing, each after its own inputs."""
    seen: set[str] = set()

    def walk(place: str) -> Iterator[str]:
        if place in seen or Path(place).exists():
            return
        seen.add(place)
        how = recipe.files.get(place, "")
        if how.startswith(CURATE):
            for needed in inputs_of(how):
                yield from walk(needed)
        yield place

    starts = [str(encoder.start) for encoder in recipe.encoders.values() if encoder.start is not None]
    dev = [str(recipe.dev.folder)] if recipe.dev is not None else []
    for place in (*starts, *(file for stage in stages.values() for file in files_of(stage)), *dev):
        if not place.startswith("@"):
            yield from walk(place)
