"""Prompts of language models: files NAME.LANGUAGE.txt beside this one, with {fields} to fill in."""

from __future__ import annotations

import re
from pathlib import Path

LANGUAGE, LANGUAGES = "zh", ("zh", "en")
_FIELD = re.compile(r"\{(\w+)\}")


def load(name: str, language: str) -> str:
    return (Path(__file__).parent / f"{name}.{language}.txt").read_text(encoding="utf-8").strip()


def fill(prompt: str, **values: str) -> str:
    """The prompt with its fields; what looks like a field inside a value, or has none, stays as it is."""
    return _FIELD.sub(lambda found: values.get(found[1], found[0]), prompt)
