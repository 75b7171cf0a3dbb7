"""What is wrong with a recipe, in one line that a person can act on. Knows no recipe's keys: they are given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

from pydantic import ValidationError

from models.errors import BadData


def first_fault(error: ValidationError, keys: Collection[str]) -> str:
    """The first fault, by its key and in words."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if place[:1] == ["stages"]:
        del place[2:3]  # the kind of the stage, which is not part of the key
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        said = _no_such_key(place[-1], keys)
    elif first["type"] == "union_tag_not_found":
        said = "a stage needs a kind"
    return ": ".join(part for part in (".".join(place), said) if part)


def check_stars(changes: Sequence[str], keys: Collection[str]) -> None:
    """A change with a star touches only what is there: so a key that is nowhere would pass unseen."""
    for key in (change.partition("=")[0] for change in changes):
        last = key.rpartition(".")[2]
        if "*" in key and last not in keys:
            raise BadData(f"--set {key}: {_no_such_key(last, keys)}")


def _no_such_key(name: str, keys: Collection[str]) -> str:
    near = get_close_matches(name, keys, n=1, cutoff=0.7)
    return f"no such key; did you mean {near[0]}?" if near else "no such key; models/training/recipe.py has them all"
