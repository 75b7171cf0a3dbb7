"""A condition as intervals of what is stored, which a database is asked, admits what the column's own answer admits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.store.documents import Value
from indexer.store.filters import AnyOf, Equal, Filter, Range
from indexer.store.metadata import MetadataIndex
from indexer.store.metadata_writer import MetadataWriter

TEXTS = st.sampled_from(["", "a", "ab", "b", "心", "心脏", "2025-01-01", "true"])
NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 2.5]), st.floats(allow_nan=False, allow_infinity=False))
ASKED_NUMBERS = st.one_of(NUMBERS, st.floats())


def filters(values: st.SearchStrategy[str] | st.SearchStrategy[float]) -> st.SearchStrategy[Filter]:
    bound = st.none() | values
    ranges = st.builds(Range, st.just("field"), bound, bound, bound, bound).filter(lambda one: one != Range("field"))
    any_of = st.builds(AnyOf, st.just("field"), st.lists(values, max_size=3).map(tuple))
    return st.one_of(st.builds(Equal, st.just("field"), values), any_of, ranges)


def check(stored: Sequence[Value], condition: Filter) -> None:
    with TemporaryDirectory() as folder:
        writer = MetadataWriter(Path(folder))
        for value in stored:
            writer.add({"field": value})
        writer.close()
        metadata = MetadataIndex.open(Path(folder), len(stored))
        column = metadata.column(condition)
        intervals = column.intervals(condition)
        admitted = [
            any(low <= number <= high for number in np.atleast_1d(known) for low, high in intervals)
            for row in range(len(stored))
            for known in [[] if column.stored(row) is None else column.stored(row)]
        ]
        assert admitted == metadata.select([condition]).tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | NUMBERS, max_size=6), filters(ASKED_NUMBERS))
def test_of_numbers(stored: list[float | None], condition: Filter) -> None:
    check([1.0, *stored], condition)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.none() | TEXTS | st.lists(TEXTS, max_size=3), max_size=6), filters(TEXTS))
def test_of_texts_and_lists(stored: list[Value], condition: Filter) -> None:
    check(["a", *stored], condition)
