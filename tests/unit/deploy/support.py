"""Reads the files of a deployment as their programs would, as far as the tests need: there is no engine to ask."""

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
    """One instruction of a Dockerfile, continuation lines joined; `stage` is the target it belongs to."""

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
    """What follows `name` in the instructions of one stage, after those of the stage that it is built on."""
    own = [one for one in dockerfile() if one.stage == stage]
    base = own[0].rest.split(" AS ")[0]
    inherited = instructions(base, name) if name != "FROM" and any(one.stage == base for one in dockerfile()) else []
    return inherited + [one.rest for one in own if one.name == name]


def copied_sources() -> Iterator[str]:
    """Every path of the repository that the Dockerfile copies."""
    for one in dockerfile():
        if one.name == "COPY" and "--from=" not in one.rest:
            yield from one.rest.split()[:-1]


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path from the builder: the last pattern that matches it or a parent decides."""
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
    """docker-compose.yml with every `${NAME:-default}` at its default."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", _read("docker-compose.yml"))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def load_yaml(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(_read(path))
    return found


def manifest(kind: str) -> dict[str, Any]:
    """The only object of its kind that the chart makes with its default values."""
    (found,) = [
        each for each in yaml.safe_load_all(_read("deploy/kubernetes/care-search.yaml")) if each["kind"] == kind
    ]
    made: dict[str, Any] = found
    return made


@cache
def locked(lock: str = "serve") -> dict[str, str]:
    """Packages of a lock, by normalised name, with the whole text of their entry."""
    entries = re.split(r"^(?=[A-Za-z0-9])", _read(f"requirements/{lock}.lock"), flags=re.MULTILINE)
    return {normalise(re.split(r"[=<>; \[]", entry)[0]): entry for entry in entries if re.match(r"[A-Za-z0-9]", entry)}


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_care(words: Sequence[str]) -> dict[str, Any]:
    """The arguments as the `care` command itself reads them; SystemExit where it would refuse them."""
    module, _ = cli.COMMANDS[words[0]]
    parser = ArgumentParser()
    room: Any = import_module(module)
    room.add_arguments(parser)
    return vars(parser.parse_args(words[1:]))


def _read(path: str) -> str:
    return (REPOSITORY / path).read_text(encoding="utf-8")
