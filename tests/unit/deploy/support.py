"""Readers of deployment files, as far as the tests need them; no container engine is used."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

import cli

REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile with joined continuation lines; `stage` is its target."""

    stage: str
    name: str
    rest: str


@cache
def dockerfile() -> list[Instruction]:
    lines = [line for line in _read("Dockerfile").splitlines() if not line.startswith("#")]
    found: list[Instruction] = []
    stage = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            stage = rest.split(" AS ")[1]
        if name:
            found.append(Instruction(stage, name, rest.strip()))
    return found


def instructions(stage: str, name: str) -> list[str]:
    """Returns the arguments of `name` in one stage, after those of the stage that it is built on."""
    own = [one for one in dockerfile() if one.stage == stage]
    base = own[0].rest.split(" AS ")[0]
    inherited = instructions(base, name) if name != "FROM" and any(one.stage == base for one in dockerfile()) else []
    return inherited + [one.rest for one in own if one.name == name]


def copied_sources() -> Iterator[str]:
    """Yields every path of the repository that the Dockerfile copies."""
    for one in dockerfile():
        if one.name == "COPY" and "--from=" not in one.rest:
            yield from one.rest.split()[:-1]


def is_ignored(path: str) -> bool:
    """Returns whether .dockerignore excludes a path: the last pattern that matches it or a parent decides."""
    ignored = False
    for line in _read(".dockerignore").splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            regex = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{regex}(/.*)?", path):
                ignored = not line.startswith("!")
    return ignored


@cache
def compose() -> dict[str, Any]:
    """Reads docker-compose.yml with every `${NAME:-default}` at its default."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", _read("docker-compose.yml"))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def load_yaml(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(_read(path))
    return found


def manifest(kind: str) -> dict[str, Any]:
    """Returns the only object of its kind that the chart makes with its default values."""
    (found,) = [
        each for each in yaml.safe_load_all(_read("deploy/kubernetes/care-search.yaml")) if each["kind"] == kind
    ]
    made: dict[str, Any] = found
    return made


@cache
def locked(lock: str = "serve") -> dict[str, str]:
    """Returns the packages of a lock by normalised name, with the whole text of their entry."""
    entries = re.split(r"^(?=[A-Za-z0-9])", _read(f"requirements/{lock}.lock"), flags=re.MULTILINE)
    return {normalise(re.split(r"[=<>; \[]", entry)[0]): entry for entry in entries if re.match(r"[A-Za-z0-9]", entry)}


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_care(arguments: Sequence[str]) -> dict[str, Any]:
    """Parses arguments as the `care` command does; raises SystemExit if it refuses them."""
    module, _ = cli.COMMANDS[arguments[0]]
    parser = ArgumentParser()
    room: Any = import_module(module)
    room.add_arguments(parser)
    return vars(parser.parse_args(arguments[1:]))


def _read(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")
