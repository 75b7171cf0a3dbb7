"""The values of a recipe file: its bases below it, changes from the command line above it. Knows no recipe's keys."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.errors import BadData


def read_values(path: Path, changes: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file; a change is KEY=VALUE, the key with dots, the value as in TOML or a bare word."""
    values = _read(path)
    for change in changes:
        _apply(values, change)
    return values


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadData(f"{path}: no such recipe") from error
    except tomllib.TOMLDecodeError as error:
        raise BadData(f"{path}: not TOML: {error}") from error
    base = values.pop("base", None)
    return values if base is None else _overlaid(_read(path.parent / base), values)


def _overlaid(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, anything else is replaced; new keys come last."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _overlaid(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals:
        raise BadData(f"--set {change}: write KEY=VALUE, for example stages.align.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    first, *rest = key.split(".")
    table = values.get(first)
    if len(rest) > 1 and isinstance(table, dict) and rest[0] not in (*table, "*"):
        raise BadData(f"--set {key}: {first} has no {rest[0]}, only {', '.join(table)}")
    _put(values, [first, *rest], value)


def _put(values: dict[str, Any], path: Sequence[str], value: object) -> None:
    """Sets a key; below "*", in every table, only what is there is replaced."""
    first, *rest = path
    if first == "*":
        for table in values.values():
            if isinstance(table, dict) and _has(table, rest):
                _put(table, rest, value)
    elif rest:
        below = values.setdefault(first, {})
        if not isinstance(below, dict):
            raise BadData(f"--set: {first} is no table, so it has no {'.'.join(rest)}")
        _put(below, rest, value)
    else:
        values[first] = value


def _has(table: object, path: Sequence[str]) -> bool:
    for key in path:
        if not isinstance(table, dict) or key not in table:
            return False
        table = table[key]
    return True
