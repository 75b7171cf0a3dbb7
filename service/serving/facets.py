"""Counts documents by metadata value, with posted documents included and hidden ones left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from indexer.store.filters import NUMBER, TEXT, kind_of, spell_all
from indexer.store.metadata import FACET_VALUES
from service.serving.serving import Serving


def count_facets(serving: Serving) -> dict[str, dict[str, int]]:
    """For each field of few distinct texts: documents by value, the most frequent first."""
    if serving.fresh is None:
        return serving.facets
    texts = {name for name, kind in serving.overlay.kinds.items() if kind == TEXT}
    counted = {name: Counter(counts) for name, counts in serving.facets.items() if name in texts}
    # A field with too many values in the snapshot is no facet, even if posted documents have few of them.
    crowded = {name for name, kind in serving.snapshot.metadata.kinds.items() if kind == TEXT} - set(serving.facets)
    for row in serving.overlay.gone:
        for name, value in _texts(serving.snapshot.documents.get(row).metadata):
            if name in counted:
                counted[name][value] -= 1
    for row in serving.overlay.rows.values():
        for name, value in _texts(serving.document(row).metadata):
            if name in texts and name not in crowded:
                counted.setdefault(name, Counter())[value] += 1
    present = {name: {value: count for value, count in each.items() if count} for name, each in counted.items()}
    return {name: _sorted(counts) for name, counts in sorted(present.items()) if len(counts) <= FACET_VALUES}


def count_values(serving: Serving, rows: Iterable[int], fields: Sequence[str]) -> dict[str, dict[str, int]]:
    """The most frequent values of each field among these document rows; a number is spelled as in JSON, 5.0 as 5."""
    counted: dict[str, Counter[str]] = {field: Counter() for field in fields}
    for row in rows:
        metadata = serving.document(row).metadata
        for field, counts in counted.items():
            value = metadata.get(field)
            is_text = value is None or kind_of(value) == TEXT
            counts.update(set(spell_all(value)) if is_text else [orjson.dumps(value).decode().removesuffix(".0")])
    return {field: _sorted(counts, FACET_VALUES) for field, counts in counted.items()}


def number_ranges(serving: Serving) -> dict[str, tuple[float, float]]:
    """The least and the greatest value of each field of numbers, hidden documents included."""
    found: dict[str, tuple[float, float]] = {}
    for metadata in (serving.snapshot.metadata, *(block.metadata for block in serving.overlay.blocks)):
        for name, (low, high) in metadata.ranges.items():
            if serving.overlay.kinds.get(name) != NUMBER:
                continue
            known = found.get(name, (low, high))
            found[name] = min(low, known[0]), max(high, known[1])
    return found


def _sorted(counts: Mapping[str, int], most: int | None = None) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:most])


def _texts(metadata: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in metadata.items():
        if kind_of(value) == TEXT:
            yield from ((name, text) for text in dict.fromkeys(spell_all(value)))
