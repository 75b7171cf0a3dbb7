"""What a document's metadata may hold: the same for a row of a corpus and for a document that a service is given."""

from __future__ import annotations

import math
from datetime import date

from indexer.store.documents import Value
from models.errors import CareError

LARGEST = 2**63
NUMBER, TEXT = "a number", "text"

SplitNumber = tuple[float, int]
"""A number as the nearest float64 and what that leaves over of a whole number: the pairs compare as the numbers do."""


class BadValue(CareError):
    """A metadata value that no filter column can hold."""


def as_value(name: str, value: object) -> Value:
    """A metadata value as the store takes it; dates become ISO texts, which sort as dates do."""
    if isinstance(value, date):  # a datetime is a date too
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # Parquet files made from data frames spell a missing number this way
    if isinstance(value, int) and not -LARGEST <= value < LARGEST:
        raise BadValue(f"metadata field {name} is a whole number of more than 64 bits; give it as text")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise BadValue(f"metadata field {name} is neither text, number, true/false nor a list of texts")


def split_number(number: int | float) -> SplitNumber:
    try:
        nearest = float(number)
    except OverflowError:  # a whole number of a filter that is larger than anything stored
        return (math.inf if number > 0 else -math.inf), 0
    return nearest, number - int(nearest) if isinstance(number, int) else 0


def read_number(text: str) -> int | float | None:
    """The number that a text spells, whole numbers exactly; None if it spells none."""
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return None


def kind_of(value: Value) -> str:
    """In words: one field has one kind in all documents."""
    return NUMBER if isinstance(value, int | float) and not isinstance(value, bool) else TEXT


def has_value(value: Value) -> bool:
    """Whether a column has to hold it: neither nothing nor an empty list."""
    return value is not None and value != []


def spell(value: object) -> str:
    """A text as keyword columns spell it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        raise TypeError(f"a text column was given {value!r}")
    return value


def spell_all(value: Value) -> list[str]:
    """The texts of a value: none, one, or those of a list."""
    if value is None:
        return []
    return [spell(item) for item in value] if isinstance(value, list | tuple) else [spell(value)]
