"""Reads a recipe's TOML file as nested tables, over those of its bases and under `--set` changes.

What the keys mean is in models.training.recipe and models.training.stages.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from models.errors import BadData

RECIPES = Path(__file__).parent / "recipes"
Tables = dict[str, Any]


def read_tables(path: Path, above: frozenset[Path] = frozenset()) -> Tables:
    """Reads the tables of a recipe over those of its base; `above` are the recipes that lead here."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        bundled = ", ".join(sorted(each.name for each in RECIPES.glob("*.toml")))
        raise BadData(f"{path}: no such recipe; give the path of a file, {RECIPES} has {bundled}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadData(f"{path}: not TOML: {error}") from error
    if (base := values.pop("base", None)) is None:
        return values
    if not isinstance(base, str):
        raise BadData(f"{path}: base: name one recipe")
    if (here := path.resolve()) in above:
        raise BadData(f"{path}: base: these recipes lie over each other in a circle")
    return overlaid(read_tables(path.parent / base, above | {here}), values)


def overlaid(below: Tables, above: Tables) -> Tables:
    """Tables are merged, anything else is replaced; new keys come last."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = overlaid(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def apply_change(values: Tables, change: str, known: Sequence[str]) -> None:
    """Carries out `KEY=VALUE`; `known` are the names of all keys that a recipe may have."""
    key, equals, text = change.partition("=")
    if not equals:
        raise BadData(f"--set {change}: write KEY=VALUE, for example stages.align.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    first, *rest = path = key.split(".")
    table = values.get(first)
    if len(rest) > 1 and isinstance(table, dict) and rest[0] not in (*table, "*"):
        raise BadData(f"--set {key}: {first} has no {rest[0]}, only {', '.join(table)}")
    # A star touches only keys that are there, so a key that is nowhere would pass unseen.
    if "*" in key and path[-1] not in known:
        raise BadData(f"--set {key}: {no_such_key(path[-1], known)}")
    _put(values, path, value)


def _put(values: Tables, path: Sequence[str], value: object) -> None:
    """Sets a key; below "*", in every table, only what is there is replaced."""
    first, *rest = path
    if first == "*":
        for table in values.values():
            if isinstance(table, dict) and _has(table, rest):
                _put(table, rest, value)
    elif rest:
        below = values.setdefault(first, {})
        if not isinstance(below, dict):
            raise BadData(f"--set: {first} is not a table, so it has no {'.'.join(rest)}")
        _put(below, rest, value)
    else:
        values[first] = value


def _has(table: object, path: Sequence[str]) -> bool:
    for key in path:
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True


def no_such_key(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "models/training/{recipe,stages}.py have them all"
    return f"no such key; {hint}"
