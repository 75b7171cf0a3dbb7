"""docs/architecture.md names every module, so that it can be found there."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGES = ("models", "models/training", "indexer", "service")


def test_every_module_is_named_in_the_architecture_document() -> None:
    shown = Path("docs/architecture.md").read_text(encoding="utf-8").split("```")[1]
    named = set(re.findall(r"\w+", shown))
    modules = [path for package in PACKAGES for path in Path(package).glob("*.py") if path.stem != "__init__"]
    assert [str(path) for path in modules if path.stem not in named] == []
