"""Conditions as intervals for a database admit the same documents as the column's own evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.store.columns import Column
from indexer.store.filters import AnyOf, Equal, Filter, Range, Value
from indexer.store.metadata import MetadataIndex
from indexer.store.writer import MetadataWriter

TEXTS = st.sampled_from(["", "a", "ab", "b", "心", "心脏", "2025-01-01", "true"])
LARGE = 2**62
WHOLE = st.one_of(st.integers(LARGE - 600, LARGE + 600), st.integers(-(2**63), 2**63 - 1))
NUMBERS = st.one_of(st.sampled_from([0.0, -0.0, 1.0, 2.5]), WHOLE, st.floats(allow_nan=False, allow_infinity=False))
ASKED_NUMBERS = st.one_of(NUMBERS, st.floats(allow_nan=False), st.integers())


def filters(values: st.SearchStrategy[str] | st.SearchStrategy[float]) -> st.SearchStrategy[Filter]:
    bound = st.none() | values
    ranges = st.builds(Range, st.just("field"), bound, bound, bound, bound).filter(lambda one: one != Range("field"))
    any_of = st.builds(AnyOf, st.just("field"), st.lists(values, max_size=3).map(tuple))
    return st.one_of(st.builds(Equal, st.just("field"), values), any_of, ranges)


def stored_numbers(column: Column, row: int) -> list[tuple[float, int]]:
    known = column.stored(row)
    return [(code, 0) for code in known] if isinstance(known, list) else [] if known is None else [known]


def check(stored: Sequence[Value], condition: Filter) -> None:
    with TemporaryDirectory() as folder:
        writer = MetadataWriter(Path(folder), ExitStack())
        for value in stored:
            writer.add({"field": value})
        writer.close()
        metadata = MetadataIndex.open(Path(folder), len(stored))
        column = metadata.column(condition)
        intervals = column.intervals(condition)
        admitted = [
            any(low <= number <= high for number in stored_numbers(column, row) for low, high in intervals)
            for row in range(len(stored))
        ]
        assert admitted == metadata.select([condition]).tolist()


@settings(max_examples=60)
@given(st.lists(st.none() | NUMBERS, max_size=6), filters(ASKED_NUMBERS))
def test_intervals_of_numbers_admit_what_select_admits(stored: list[float | None], condition: Filter) -> None:
    check([1.0, *stored], condition)


@settings(max_examples=200)
@given(st.lists(NUMBERS, min_size=1, max_size=8), NUMBERS, NUMBERS)
def test_integers_and_floats_are_compared_exactly_as_in_python(
    stored: list[float], first: float, second: float
) -> None:
    """Python compares integers and floats exactly."""
    conditions = {
        Equal("field", first): lambda value: value == first,
        AnyOf("field", (first, second)): lambda value: value in (first, second),
        Range("field", gte=first, lt=second): lambda value: first <= value < second,
        Range("field", gt=first, lte=second): lambda value: first < value <= second,
    }
    with TemporaryDirectory() as folder:
        writer = MetadataWriter(Path(folder), ExitStack())
        for value in [*stored, first]:
            writer.add({"field": value})
        writer.close()
        written = MetadataIndex.open(Path(folder), len(stored) + 1)
        in_memory = MetadataIndex.of([{"field": value} for value in [*stored, first]])
        for condition, accepts in conditions.items():
            expected = [accepts(value) for value in [*stored, first]]
            assert written.select([condition]).tolist() == expected
            assert in_memory.select([condition]).tolist() == expected


@settings(max_examples=60)
@given(st.lists(st.none() | TEXTS | st.lists(TEXTS, max_size=3), max_size=6), filters(TEXTS))
def test_intervals_of_texts_and_lists_admit_what_select_admits(stored: list[Value], condition: Filter) -> None:
    check(["a", *stored], condition)
