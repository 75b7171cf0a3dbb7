"""Filter columns: one metadata field of all documents. Maps a condition to a boolean array over rows.

A number column is float64 (NaN: missing) plus the rests of rounded integers, so that 64-bit integers compare exactly. A
keyword column is codes into a sorted vocabulary, so a range of texts is a range of codes. A missing value matches
nothing. Every condition is a few intervals of stored values, which a database can evaluate too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np

from indexer.errors import BadFilter, BadSnapshot
from indexer.store import filters as f
from indexer.store.arrays import Array, Blob, Mask, Rows, load_array
from indexer.store.filters import Condition, FilterValue, Range, SplitNumber

# Scanning a vocabulary of this many values takes no longer than one binary search.
SCANNED = 16
# Rows in which an example of a number is looked for.
EXAMPLE_ROWS = 10_000
Interval = tuple[SplitNumber, SplitNumber]
"""Stored numbers from the first to the second, both included; a code is an integer without a rest."""


class FieldKind(StrEnum):
    """How a field is stored: texts, lists of texts, or numbers. True and false are the texts "true" and "false"."""

    KEYWORD = "keyword"
    KEYWORDS = "keywords"
    NUMBER = "number"


class NumberColumn:
    """`values` (documents,) float64; `rests` int16, None if every value is exact: a number is the sum of both."""

    def __init__(self, values: Array, rests: Array | None = None) -> None:
        self._values = values
        self._rests = rests

    @classmethod
    def open(cls, folder: Path, name: str, documents: int) -> NumberColumn:
        rests = folder / f"{name}.rests.npy"
        values = load_array(folder / f"{name}.values.npy", "<f8", (documents,))
        return cls(values, load_array(rests, "<i2", (documents,)) if rests.exists() else None)

    @classmethod
    def of(cls, rows: int, numbers: Mapping[int, int | float]) -> NumberColumn:
        """Returns the column of a few documents: the number of each row that has one."""
        values, rests = np.full(rows, np.nan), np.zeros(rows, np.int16)
        for row, number in numbers.items():
            values[row], rests[row] = f.split_number(number)
        return cls(values, rests if rests.any() else None)

    def part(self, rows: Mask) -> NumberColumn | None:
        """Returns the column of these documents alone; None if none of them has a value."""
        values = self._values[rows]
        if np.isnan(values).all():
            return None
        return NumberColumn(values, None if self._rests is None else self._rests[rows])

    @property
    def has_rests(self) -> bool:
        return self._rests is not None

    def match(self, condition: Condition) -> Mask:
        if isinstance(condition, Range):
            low, high = self._bounds(condition)
            above = self._compare(np.greater, np.greater_equal, low)
            return above & self._compare(np.less, np.less_equal, high)
        wanted = [self._number(condition.field, value) for value in f.values_of(condition)]
        if self._rests is None:
            return np.isin(self._values, [value for value, rest in wanted if not rest])
        # As complex numbers both halves are compared in one call.
        return np.isin(self._values + 1j * self._rests, [complex(*each) for each in wanted])

    def intervals(self, condition: Condition) -> list[Interval]:
        """Intervals that hold the number of each document that satisfies the condition; none: no document does."""
        if isinstance(condition, Range):
            bounds = [self._bounds(condition)]
        else:
            bounds = [(self._number(condition.field, value),) * 2 for value in f.values_of(condition)]
        # Stored numbers are finite.
        return [(low, high) for low, high in bounds if low <= high and low[0] < np.inf and high[0] > -np.inf]

    def limits(self) -> tuple[float, float] | None:
        """Returns the least and the greatest value."""
        low, high = np.fmin.reduce(self._values), np.fmax.reduce(self._values)
        if np.isnan(low):
            return None
        if self._rests is None:
            return float(low), float(high)
        least, most = (int(reduce(self._rests[self._values == end])) for end, reduce in ((low, np.min), (high, np.max)))
        return f.whole_number((float(low), least)), f.whole_number((float(high), most))

    def example(self) -> float | None:
        present = np.flatnonzero(~np.isnan(self._values[:EXAMPLE_ROWS]))
        stored = self.stored(int(present[0])) if len(present) else None
        return None if stored is None else f.whole_number(stored)

    def count(self, rows: Rows | None = None) -> int:
        """Returns how many documents, of all or of these rows, have a value."""
        values = self._values if rows is None else self._values[rows]
        return len(values) - int(np.count_nonzero(np.isnan(values)))

    def stored(self, row: int) -> SplitNumber | None:
        """Returns the number of a document, None if it has none."""
        value = float(self._values[row])
        return None if np.isnan(value) else (value, 0 if self._rests is None else int(self._rests[row]))

    def _compare(self, beyond: np.ufunc, or_equal: np.ufunc, bound: SplitNumber) -> Mask:
        """Returns which numbers equal the bound or lie beyond it."""
        value, rest = bound
        if self._rests is None:
            return np.asarray((or_equal if or_equal(0, rest) else beyond)(self._values, value), dtype=np.bool_)
        at_value = (self._values == value) & or_equal(self._rests, rest)
        return np.asarray(beyond(self._values, value) | at_value, dtype=np.bool_)

    def _bounds(self, condition: Range) -> Interval:
        """Returns the least and the greatest number that the condition admits."""
        lows, highs = [(-np.inf, 0)], [(np.inf, 0)]
        steps = (condition.gte, lows, 0), (condition.gt, lows, 1), (condition.lte, highs, 0), (condition.lt, highs, -1)
        for bound, bounds, step in steps:
            if bound is not None:
                value, rest = self._number(condition.field, bound)
                bounds.append((value, rest + step))
        return max(lows), min(highs)

    @staticmethod
    def _number(field: str, value: FilterValue) -> SplitNumber:
        if (number := f.as_number(value)) is None:
            raise BadFilter(field, f"filter on {field}: {value!r} is not a number, and {field} holds numbers")
        return f.split_number(number)


class KeywordColumn:
    """`codes` int32 into the sorted `vocabulary`, −1: missing; lists are `codes[starts[row]:starts[row + 1]]`."""

    has_rests = False

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
        """Returns the column of a few documents, each with any number of texts."""
        spelled = [[text.encode() for text in dict.fromkeys(texts)] for texts in rows]
        vocabulary = sorted({text for texts in spelled for text in texts})
        codes = {text: code for code, text in enumerate(vocabulary)}
        flat = np.array([codes[text] for texts in spelled for text in texts], dtype=np.int32)
        return cls(Blob.of(vocabulary), flat, np.cumsum([0, *map(len, spelled)]))

    def part(self, rows: Mask) -> KeywordColumn | None:
        """Returns the column of these documents, without others' values in its vocabulary; None if they have none."""
        codes, starts = self._codes, self._starts
        if starts is None:
            codes = codes[rows]
        else:
            lengths = np.diff(starts)
            codes, starts = codes[np.repeat(rows, lengths)], np.cumsum([0, *lengths[rows].tolist()])
        kept = np.unique(codes[codes >= 0])
        if not len(kept):
            return None
        vocabulary = Blob.of([self._vocabulary[code] for code in kept.tolist()])
        return KeywordColumn(vocabulary, np.where(codes < 0, -1, np.searchsorted(kept, codes)), starts)

    def __len__(self) -> int:
        """The number of distinct values."""
        return len(self._vocabulary)

    def match(self, condition: Condition) -> Mask:
        if isinstance(condition, Range):
            low, high = self._code_range(condition)
            matching = (self._codes >= low) & (self._codes < high)
        else:
            matching = np.isin(self._codes, self._codes_of(condition))
        if self._starts is None:
            return matching
        mask = np.zeros(len(self._starts) - 1, dtype=np.bool_)
        mask[np.searchsorted(self._starts, np.flatnonzero(matching), side="right") - 1] = True
        return mask

    def intervals(self, condition: Condition) -> list[Interval]:
        """Intervals that hold a code of each document that satisfies the condition; none: no document does."""
        if isinstance(condition, Range):
            low, high = self._code_range(condition)
            return [((low, 0), (high - 1, 0))] if low < high else []
        return [((code, 0), (code, 0)) for code in self._codes_of(condition)]

    def example(self) -> str | None:
        return self._vocabulary[0].decode() if len(self) else None

    def count(self, rows: Rows | None = None) -> int:
        """Returns how many documents, of all or of these rows, have a value."""
        if self._starts is None:
            return int(np.count_nonzero((self._codes if rows is None else self._codes[rows]) >= 0))
        lengths = np.diff(self._starts) if rows is None else self._starts[rows + 1] - self._starts[rows]
        return int(np.count_nonzero(lengths))

    def stored(self, row: int) -> list[int]:
        """Returns the codes of a document, none if it has no value."""
        if self._starts is None:
            first, end = row, row + (self._codes[row] >= 0)
        else:
            first, end = self._starts[row], self._starts[row + 1]
        codes: list[int] = self._codes[first:end].tolist()
        return codes

    def counts(self) -> dict[str, int]:
        """Returns how many documents have each value, the most frequent first."""
        codes = self._codes[self._codes >= 0]
        try:
            if codes.max(initial=-1) >= len(self):
                raise ValueError(f"a code beyond its {len(self)} values")
            values = [self._vocabulary[code].decode() for code in range(len(self))]
        except ValueError as error:  # of which a text that is not UTF-8 is one
            raise BadSnapshot(f"a column of the metadata is damaged ({error}); build the snapshot again") from error
        counts = np.bincount(codes, minlength=len(self)).tolist()
        return dict(sorted(zip(values, counts, strict=True), key=lambda pair: (-pair[1], pair[0])))

    def _codes_of(self, condition: f.Equal | f.AnyOf) -> list[int]:
        wanted = dict.fromkeys(_text(condition.field, value) for value in f.values_of(condition))
        if len(self) < SCANNED * len(wanted):
            return [code for code in range(len(self)) if self._vocabulary[code] in wanted]
        places = ((text, bisect_left(self._vocabulary, text)) for text in wanted)
        return [code for text, code in places if code < len(self) and self._vocabulary[code] == text]

    def _code_range(self, condition: Range) -> tuple[int, int]:
        lows, highs = [0], [len(self)]
        for bound, bounds, bisect in (
            (condition.gte, lows, bisect_left),
            (condition.gt, lows, bisect_right),
            (condition.lte, highs, bisect_right),
            (condition.lt, highs, bisect_left),
        ):
            if bound is not None:
                bounds.append(bisect(self._vocabulary, _text(condition.field, bound)))
        return max(lows), min(highs)


Column = NumberColumn | KeywordColumn


def _text(field: str, value: FilterValue) -> bytes:
    """Returns the value as the vocabulary spells it: UTF-8, whose byte order is that of the code points."""
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, str):
        return value.encode("utf-8", errors="surrogatepass")  # a lone surrogate equals no stored text
    raise BadFilter(field, f"filter on {field}: {value!r} is not a text, and {field} holds texts")
