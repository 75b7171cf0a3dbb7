"""Prompts for language models: files NAME.LANGUAGE.txt in this folder, with {fields} to fill in."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

LANGUAGE, LANGUAGES = "zh", ("zh", "en")
BLIND = "blind"
"""The prompt for a hypothetical document whose writer sees the query alone."""
_FIELD = re.compile(r"\{(\w+)\}")
_CHINESE = re.compile("[\u3400-\u9fff]")


@cache
def load(name: str, language: str) -> str:
    return (Path(__file__).parent / f"{name}.{language}.txt").read_text(encoding="utf-8").strip()


def fill(prompt: str, **values: str) -> str:
    """Returns the prompt with its fields; what looks like a field inside a value, or has none, stays as it is."""
    return _FIELD.sub(lambda found: values.get(found[1], found[0]), prompt)


def ask_for_document(query: str) -> str:
    """Returns HyDE's prompt in the query's language: the same in the service, in evaluation and in training."""
    return fill(load(BLIND, "zh" if _CHINESE.search(query) else "en"), query=query)
