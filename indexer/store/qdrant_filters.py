"""Filters as a Qdrant server is asked them, and the payload that they are asked of.

A point's payload shows its document's id, title and metadata to whoever reads the collection; `codes` is what filters
look at: what the snapshot's columns store, numbers as they are and texts as codes of the sorted vocabulary. Qdrant has
no range of texts and no equality of fractions; over codes and intervals every filter means what it means here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from qdrant_client import models

from indexer.store.columns import Interval, NumberColumn
from indexer.store.filters import AnyOf, Either, Filter, Not
from indexer.store.metadata import MetadataIndex
from indexer.store.snapshot import Snapshot

CODES = "codes"


def payload_indexes(metadata: MetadataIndex) -> dict[str, models.PayloadSchemaType]:
    """The payload's fields that filters look at, and what they hold."""
    schema = models.PayloadSchemaType
    return {
        _key(position): schema.FLOAT if isinstance(column, NumberColumn) else schema.INTEGER
        for position, column in enumerate(metadata.columns)
    }


def payload(snapshot: Snapshot, passage: int) -> dict[str, Any]:
    """What is stored beside the vector of a passage row."""
    document = int(snapshot.passages.documents[passage])
    shown: dict[str, Any] = orjson.loads(b"{%b}" % snapshot.documents.get(document).json)
    stored = {_name(position): column.stored(document) for position, column in enumerate(snapshot.metadata.columns)}
    return shown | {CODES: {name: value for name, value in stored.items() if value not in (None, [])}}


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
    intervals = metadata.column(given).intervals(given)
    return bool(intervals) and _condition(_key(metadata.position(given.field)), intervals)


def _condition(key: str, intervals: list[Interval]) -> models.Condition:
    """The field's number, or one of its codes, lies in one of the intervals."""
    if all(isinstance(low, int) and low == high for low, high in intervals):
        return models.FieldCondition(key=key, match=models.MatchAny(any=[int(low) for low, _ in intervals]))
    ranges: list[models.Condition] = [
        models.FieldCondition(key=key, range=models.Range(gte=_bound(low), lte=_bound(high))) for low, high in intervals
    ]
    return ranges[0] if len(ranges) == 1 else models.Filter(should=ranges)


def _bound(number: float) -> float | None:
    """JSON has no infinity, and needs none."""
    return None if number in (float("inf"), float("-inf")) else number


def _name(position: int) -> str:
    # By position: a field's name may hold anything, a path in a payload may not.
    return f"f{position}"


def _key(position: int) -> str:
    return f"{CODES}.{_name(position)}"
