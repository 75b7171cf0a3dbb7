"""Facts of the installed package: its version, the bundled encoders, and argparse types that commands share."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PRETRAINED = Path(__file__).parent / "pretrained"
BUNDLED_ENCODER = PRETRAINED / "care-small-zh"
"""Reads queries and documents: for a corpus that no large encoder has read."""
BUNDLED_PAIR = PRETRAINED / "care-pair-zh"
"""Reads the queries of a collection whose documents its partner read (docs/experiments/joined-pair.md)."""

LARGEST = 2**31 - 1
"""Of the whole numbers of options: libraries in C take no larger ones."""
MOST_THREADS = 1024
"""No machine uses more, and thousands keep a process from ending for minutes."""


def care_version() -> str:
    try:
        return version("care-search")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return natural(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    if (value := int(text)) > LARGEST:
        raise ArgumentTypeError(f"{text} is more than {LARGEST}; give a smaller number")
    return value


def threads(text: str) -> int:
    if (value := positive(text)) > MOST_THREADS:
        raise ArgumentTypeError(f"{value} is more than {MOST_THREADS}; give the number of cores, or leave it out")
    return value


def number(text: str) -> float:
    """A finite number; float() takes nan and inf for numbers, too."""
    value = float(text)
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def nonnegative(text: str) -> float:
    if (value := number(text)) < 0:
        raise ArgumentTypeError(f"{text!r} is below 0")
    return value


def above_zero(text: str) -> float:
    if (value := number(text)) <= 0:
        raise ArgumentTypeError(f"{text!r} is not above 0")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value
