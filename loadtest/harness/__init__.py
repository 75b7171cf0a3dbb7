"""Shared by all measurements: errors, the repository's folder, and the host under load."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
QUERIES = REPOSITORY / "examples" / "queries.jsonl"
HOST = "127.0.0.1"
PATH, READY = "/v1/search", "/readyz"
URL = re.compile(rf"http://{re.escape(HOST)}:(\d{{1,5}})/?", re.ASCII)


class BenchError(Exception):
    """A measurement that cannot be made; the message is one line that says what to do next."""


class BadQueries(BenchError):
    """A file of queries that cannot be used."""


def port_of(url: str) -> int:
    """Returns the port of `http://127.0.0.1:PORT`; raises BenchError for any other address."""
    match = URL.fullmatch(url)
    if match is None:
        raise BenchError(f"{url}: the load goes to http://{HOST}:PORT only; start the service on this machine")
    return int(match[1])


def positive(text: str) -> int:
    """Parses a whole number of an option."""
    if not text.isdecimal() or int(text) == 0:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def above_zero(text: str) -> float:
    """Parses a limit or a duration of an option; nothing exceeds nan, so a limit of nan was always met."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def share(text: str) -> float:
    """Parses a share of an option."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return value
