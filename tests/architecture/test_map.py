"""docs/architecture.md shows where everything is: a module that it does not name cannot be found there."""

from __future__ import annotations

import re
from pathlib import Path

ROOMS = ("models", "models/training", "indexer", "service")


def test_every_module_of_the_rooms_is_on_the_map() -> None:
    shown = Path("docs/architecture.md").read_text(encoding="utf-8").split("```")[1]
    named = set(re.findall(r"\w+", shown))
    modules = [path for room in ROOMS for path in Path(room).glob("*.py") if path.stem != "__init__"]
    assert [str(path) for path in modules if path.stem not in named] == []
