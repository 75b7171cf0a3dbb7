"""What the words of a command line may be, for argparse's `type`; the errors say what was expected."""

from __future__ import annotations

from argparse import ArgumentTypeError


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value
