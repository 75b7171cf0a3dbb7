"""Filters as a Qdrant server is asked them, and the payload that they are asked of.

A point's payload shows its document's id, title and metadata to whoever reads the collection; `codes` is what filters
look at: what the snapshot's columns store, numbers as float64, what is left over of large whole numbers, and texts as
codes of the sorted vocabulary. Qdrant has no range of texts, no equality of fractions and no exact range of 64-bit
integers; over codes and intervals every filter means what it means here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import orjson
from qdrant_client import models

from indexer.store.columns import Column, Interval, NumberColumn
from indexer.store.filters import AnyOf, Either, Filter, Not
from indexer.store.metadata import MetadataIndex
from indexer.store.snapshot import Snapshot
from indexer.store.values import SplitNumber

CODES = "codes"
RESTS = "_rest"
FLOAT_MAX = sys.float_info.max


def payload_indexes(metadata: MetadataIndex) -> dict[str, models.PayloadSchemaType]:
    """The payload's fields that filters look at, and what they hold."""
    schema = models.PayloadSchemaType
    columns = list(enumerate(metadata.columns))
    kinds = {_key(n): schema.FLOAT if isinstance(column, NumberColumn) else schema.INTEGER for n, column in columns}
    return kinds | {f"{_key(n)}{RESTS}": schema.INTEGER for n, column in columns if _has_rests(column)}


def payload(snapshot: Snapshot, passage: int) -> dict[str, Any]:
    """What is stored beside the vector of a passage row."""
    document = int(snapshot.passages.documents[passage])
    shown: dict[str, Any] = orjson.loads(b"{%b}" % snapshot.documents.get(document).json)
    codes: dict[str, float | list[int]] = {}
    for position, column in enumerate(snapshot.metadata.columns):
        stored = column.stored(document)
        if isinstance(stored, list) and stored:
            codes[_name(position)] = stored
        elif isinstance(stored, tuple):
            codes[_name(position)] = stored[0]
            if _has_rests(column):
                codes[f"{_name(position)}{RESTS}"] = stored[1]
    return shown | {CODES: codes}


def conditions(metadata: MetadataIndex, filters: Sequence[Filter]) -> list[models.Condition] | None:
    """Conditions that all must hold, none for no filters; None where no point can satisfy them. Raises BadFilter."""
    written = [_write(metadata, each) for each in filters]
    if any(each is False for each in written):
        return None
    return [each for each in written if not isinstance(each, bool)]


def _write(metadata: MetadataIndex, given: Filter) -> models.Condition | bool:
    """The filter as a condition; True if every point satisfies it, False if none can."""
    if isinstance(given, Not):
        excluded = _write(metadata, given.excluded)
        return not excluded if isinstance(excluded, bool) else models.Filter(must_not=[excluded])
    if isinstance(given, Either):
        written = [_write(metadata, each) for each in given.alternatives]
        possible = [each for each in written if not isinstance(each, bool)]
        return True if any(each is True for each in written) else bool(possible) and models.Filter(should=possible)
    if isinstance(given, AnyOf) and not given.values:
        return False
    column = metadata.column(given)
    intervals = column.intervals(given)
    return bool(intervals) and _condition(_key(metadata.position(given.field)), column, intervals)


def _condition(key: str, column: Column, intervals: list[Interval]) -> models.Condition:
    """The field's number, or one of its codes, lies in one of the intervals."""
    if isinstance(column, NumberColumn):
        return _any([_all(_inside(key, *bounds, rests=column.has_rests)) for bounds in intervals])
    if all(low == high for low, high in intervals):
        return models.FieldCondition(key=key, match=models.MatchAny(any=[int(low) for (low, _), _ in intervals]))
    return _any([_range(key, gte=low, lte=high) for (low, _), (high, _) in intervals])


def _inside(key: str, low: SplitNumber, high: SplitNumber, *, rests: bool) -> list[models.Condition]:
    """Conditions that the number of a field lies between two, both included; JSON has no infinity, and needs none."""
    found: list[models.Condition] = []
    for (value, rest), beyond, or_equal in ((low, "gt", "gte"), (high, "lt", "lte")):
        if value in (float("inf"), float("-inf")):
            continue
        equal_is_inside = rest <= 0 if beyond == "gt" else rest >= 0
        if not rests:
            found.append(_range(key, **{or_equal if equal_is_inside else beyond: value}))
            continue
        at_value = _all([_range(key, gte=value, lte=value), _range(f"{key}{RESTS}", **{or_equal: rest})])
        found.append(_any([_range(key, **{beyond: value}), at_value]))
    return found or [_range(key, gte=-FLOAT_MAX)]


def _range(key: str, **bounds: float) -> models.Condition:
    return models.FieldCondition(key=key, range=models.Range(**bounds))


def _all(conditions: list[models.Condition]) -> models.Condition:
    return conditions[0] if len(conditions) == 1 else models.Filter(must=conditions)


def _any(conditions: Sequence[models.Condition]) -> models.Condition:
    return conditions[0] if len(conditions) == 1 else models.Filter(should=list(conditions))


def _has_rests(column: Column) -> bool:
    return isinstance(column, NumberColumn) and column.has_rests


def _name(position: int) -> str:
    # By position: a field's name may hold anything, a path in a payload may not.
    return f"f{position}"


def _key(position: int) -> str:
    return f"{CODES}.{_name(position)}"
