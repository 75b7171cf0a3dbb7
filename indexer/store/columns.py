"""One metadata field over all documents, as a column that answers a condition with a boolean array.

A number column is float64 (NaN: missing) and, if it holds whole numbers that float64 rounds, what rounding left over:
64-bit integers compare exactly. A keyword column is codes into a sorted vocabulary: a range of texts is a range of
codes. If documents have lists, the codes of document `row` are `codes[starts[row]:starts[row + 1]]`. A missing value
matches nothing. Every condition is a few intervals of what is stored, and can be asked of a database in that form.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexer.store.arrays import Array, Blob, load_array
from indexer.store.errors import BadFilter
from indexer.store.filters import AnyOf, Condition, Equal, FilterValue, Range
from indexer.store.values import SplitNumber, read_number, split_number

# Reading so many values of a vocabulary one after the other takes no longer than looking for one of them.
SCANNED = 16
Mask = NDArray[np.bool_]
# Rows in which an example of a number is looked for.
EXAMPLE_ROWS = 10_000
Interval = tuple[SplitNumber, SplitNumber]
"""Stored numbers from the first to the second, both included; a code is a whole number with nothing left over."""


class NumberColumn:
    """`values` (documents,) float64; `rests` int16, None if every value is exact: a number is the sum of both."""

    def __init__(self, values: Array, rests: Array | None = None) -> None:
        self._values = values
        self._rests = rests

    @classmethod
    def open(cls, folder: Path, name: str, documents: int) -> NumberColumn:
        rests = folder / f"{name}.rests.npy"
        return cls(
            load_array(folder / f"{name}.values.npy", "<f8", (documents,)),
            load_array(rests, "<i2", (documents,)) if rests.exists() else None,
        )

    @classmethod
    def of(cls, rows: int, numbers: Mapping[int, int | float]) -> NumberColumn:
        """The column of a few documents: the number of each row that has one."""
        values, rests = np.full(rows, np.nan), np.zeros(rows, np.int16)
        for row, number in numbers.items():
            values[row], rests[row] = split_number(number)
        return cls(values, rests if rests.any() else None)

    @property
    def has_rests(self) -> bool:
        return self._rests is not None

    def match(self, condition: Condition) -> Mask:
        if isinstance(condition, Range):
            low, high = self._bounds(condition)
            above = self._compare(np.greater, np.greater_equal, low)
            return above & self._compare(np.less, np.less_equal, high)
        wanted = self._numbers(condition)
        if self._rests is None:
            return np.isin(self._values, [value for value, rest in wanted if not rest])
        # As complex numbers both halves are compared in one call.
        return np.isin(self._values + 1j * self._rests, [complex(*each) for each in wanted])

    def intervals(self, condition: Condition) -> list[Interval]:
        """Where the stored number of a document that satisfies the condition lies; none: nowhere."""
        bounds = (
            [self._bounds(condition)]
            if isinstance(condition, Range)
            else [(number, number) for number in self._numbers(condition)]
        )
        # What is stored is finite.
        return [(low, high) for low, high in bounds if low <= high and low[0] < np.inf and high[0] > -np.inf]

    def limits(self) -> tuple[float, float] | None:
        """The least and the greatest value."""
        low, high = np.fmin.reduce(self._values), np.fmax.reduce(self._values)
        return None if np.isnan(low) else (float(low), float(high))

    def example(self) -> float | None:
        """A value that some document has."""
        some = self._values[:EXAMPLE_ROWS]
        present = some[~np.isnan(some)]
        return float(present[0]) if len(present) else None

    def stored(self, row: int) -> SplitNumber | None:
        """The number of a document, None if it has none."""
        value = float(self._values[row])
        return None if np.isnan(value) else (value, 0 if self._rests is None else int(self._rests[row]))

    def _compare(self, beyond: np.ufunc, or_equal: np.ufunc, bound: SplitNumber) -> Mask:
        """Which numbers equal the bound or lie beyond it."""
        value, rest = bound
        if self._rests is None:
            return np.asarray((or_equal if or_equal(0, rest) else beyond)(self._values, value), dtype=np.bool_)
        at_value = (self._values == value) & or_equal(self._rests, rest)
        return np.asarray(beyond(self._values, value) | at_value, dtype=np.bool_)

    def _bounds(self, condition: Range) -> Interval:
        """The least and the greatest number that the condition admits."""
        lows, highs = [(-np.inf, 0)], [(np.inf, 0)]
        for bound, bounds, step in (
            (condition.gte, lows, 0),
            (condition.gt, lows, 1),
            (condition.lte, highs, 0),
            (condition.lt, highs, -1),
        ):
            if bound is not None:
                value, rest = self._number(condition.field, bound)
                bounds.append((value, rest + step))
        return max(lows), min(highs)

    def _numbers(self, condition: Equal | AnyOf) -> list[SplitNumber]:
        return [self._number(condition.field, value) for value in condition.wanted]

    @staticmethod
    def _number(field: str, value: FilterValue) -> SplitNumber:
        """The value as a number; digits in a text will do, because a URL has nothing else."""
        number = read_number(value) if isinstance(value, str) else None if isinstance(value, bool) else value
        if number is None or number != number:
            raise BadFilter(field, f"filter on {field}: {value!r} is not a number, and {field} holds numbers")
        return split_number(number)


class KeywordColumn:
    """`codes` int32 into the sorted `vocabulary`, −1 where missing.

    `starts` is None, or int64 (documents + 1,) where documents have lists; then a missing value is an empty list.
    """

    def __init__(self, vocabulary: Blob, codes: Array, starts: Array | None) -> None:
        self._vocabulary = vocabulary
        self._codes = codes
        self._starts = starts

    @classmethod
    def open(cls, folder: Path, name: str, documents: int, *, lists: bool) -> KeywordColumn:
        starts = load_array(folder / f"{name}.starts.npy", "<i8", (documents + 1,)) if lists else None
        length = documents if starts is None else int(starts[-1])
        codes = load_array(folder / f"{name}.codes.npy", "<i4", (length,))
        return cls(Blob.open(folder, f"{name}.vocabulary"), codes, starts)

    @classmethod
    def of(cls, rows: Sequence[Sequence[str]]) -> KeywordColumn:
        """The column of a few documents, each with any number of texts."""
        spelled = [[text.encode() for text in dict.fromkeys(texts)] for texts in rows]
        vocabulary = sorted({text for texts in spelled for text in texts})
        codes = {text: code for code, text in enumerate(vocabulary)}
        flat = np.array([codes[text] for texts in spelled for text in texts], dtype=np.int32)
        return cls(Blob.of(vocabulary), flat, np.cumsum([0, *map(len, spelled)]))

    def __len__(self) -> int:
        """How many distinct values there are."""
        return len(self._vocabulary)

    def match(self, condition: Condition) -> Mask:
        if isinstance(condition, Range):
            low, high = self._code_range(condition)
            return self._documents((self._codes >= low) & (self._codes < high))
        return self._documents(np.isin(self._codes, self._codes_of(condition.field, condition.wanted)))

    def intervals(self, condition: Condition) -> list[Interval]:
        """Which codes a document that satisfies the condition has one of; none: there is no such code."""
        if isinstance(condition, Range):
            low, high = self._code_range(condition)
            return [((low, 0), (high - 1, 0))] if low < high else []
        return [((code, 0), (code, 0)) for code in self._codes_of(condition.field, condition.wanted)]

    def example(self) -> str | None:
        """A value that some document has."""
        return self._vocabulary[0].decode() if len(self) else None

    def stored(self, row: int) -> list[int]:
        """The codes of a document, none where it has no value."""
        if self._starts is None:
            first, end = row, row + (self._codes[row] >= 0)
        else:
            first, end = self._starts[row], self._starts[row + 1]
        codes: list[int] = self._codes[first:end].tolist()
        return codes

    def counts(self) -> dict[str, int]:
        """How many documents have each value, the most frequent first."""
        present = self._codes[self._codes >= 0]
        counts = np.bincount(present, minlength=len(self)).tolist()
        values = [self._vocabulary[code].decode() for code in range(len(self))]
        return dict(sorted(zip(values, counts, strict=True), key=lambda pair: (-pair[1], pair[0])))

    def _codes_of(self, field: str, values: Sequence[FilterValue]) -> list[int]:
        wanted = dict.fromkeys(_text(field, value) for value in values)
        if len(self) < SCANNED * len(wanted):
            return [code for code in range(len(self)) if self._vocabulary[code] in wanted]
        places = ((text, bisect_left(self._vocabulary, text)) for text in wanted)
        return [code for text, code in places if code < len(self) and self._vocabulary[code] == text]

    def _code_range(self, condition: Range) -> tuple[int, int]:
        low, high = 0, len(self)
        field = condition.field
        if condition.gte is not None:
            low = max(low, bisect_left(self._vocabulary, _text(field, condition.gte)))
        if condition.gt is not None:
            low = max(low, bisect_right(self._vocabulary, _text(field, condition.gt)))
        if condition.lte is not None:
            high = min(high, bisect_right(self._vocabulary, _text(field, condition.lte)))
        if condition.lt is not None:
            high = min(high, bisect_left(self._vocabulary, _text(field, condition.lt)))
        return low, high

    def _documents(self, matching: Mask) -> Mask:
        """From a mask over codes to a mask over documents."""
        if self._starts is None:
            return matching
        mask = np.zeros(len(self._starts) - 1, dtype=np.bool_)
        mask[np.searchsorted(self._starts, np.flatnonzero(matching), side="right") - 1] = True
        return mask


Column = NumberColumn | KeywordColumn


def _text(field: str, value: FilterValue) -> bytes:
    """The value as the vocabulary spells it: UTF-8, whose byte order is that of the code points."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, str):
        return value.encode("utf-8", errors="surrogatepass")  # a lone surrogate equals no stored text
    raise BadFilter(field, f"filter on {field}: {value!r} is not a text, and {field} holds texts")
