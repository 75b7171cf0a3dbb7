"""One metadata field over all documents, as a column that answers a condition with a boolean array.

A number column is float64 (NaN: missing). A keyword column is codes into a sorted vocabulary, so that a range of
texts is a range of codes; where documents have lists, the codes of document `row` are
`codes[starts[row]:starts[row + 1]]`. A missing value matches nothing. What a column stores are numbers either way, and
every condition is a few intervals of them: in that form it can be asked elsewhere too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexer.store.arrays import Array, Blob, load_array
from indexer.store.errors import BadFilter
from indexer.store.filters import AnyOf, Condition, Equal, FilterValue, Range

# Reading so many values of a vocabulary one after the other takes no longer than looking for one of them.
SCANNED = 16
Mask = NDArray[np.bool_]
# Rows in which an example of a number is looked for.
EXAMPLE_ROWS = 10_000
Interval = tuple[float, float]
"""Stored numbers from the first to the second, both included; codes are whole numbers."""


class NumberColumn:
    """`values` (documents,) float64."""

    def __init__(self, values: Array) -> None:
        self._values = values

    @classmethod
    def open(cls, folder: Path, name: str, documents: int) -> NumberColumn:
        return cls(load_array(folder / f"{name}.values.npy", "<f8", (documents,)))

    def match(self, condition: Condition) -> Mask:
        if isinstance(condition, Range):
            low, high = self._bounds(condition)
            return np.asarray((self._values >= low) & (self._values <= high), dtype=np.bool_)
        return np.isin(self._values, self._numbers(condition))

    def intervals(self, condition: Condition) -> list[Interval]:
        """Where the stored number of a document that satisfies the condition lies; none: nowhere."""
        bounds = (
            [self._bounds(condition)]
            if isinstance(condition, Range)
            else [(number, number) for number in self._numbers(condition)]
        )
        # What is stored is finite. Not a number is neither below nor above.
        return [(low, high) for low, high in bounds if low <= high and low < np.inf and high > -np.inf]

    def limits(self) -> tuple[float, float] | None:
        """The least and the greatest value."""
        low, high = np.fmin.reduce(self._values), np.fmax.reduce(self._values)
        return None if np.isnan(low) else (float(low), float(high))

    def example(self) -> float | None:
        """A value that some document has."""
        some = self._values[:EXAMPLE_ROWS]
        present = some[~np.isnan(some)]
        return float(present[0]) if len(present) else None

    def stored(self, row: int) -> float | None:
        """The number of a document, None where it has none."""
        value = float(self._values[row])
        return None if np.isnan(value) else value

    def _bounds(self, condition: Range) -> Interval:
        """The least and the greatest number that the condition admits."""
        lows, highs = [-np.inf], [np.inf]
        for bound, bounds, towards in (
            (condition.gte, lows, None),
            (condition.gt, lows, np.inf),
            (condition.lte, highs, None),
            (condition.lt, highs, -np.inf),
        ):
            if bound is not None:
                number = self._number(condition.field, bound)
                bounds.append(number if towards is None else float(np.nextafter(number, towards)))
        return float(np.max(lows)), float(np.min(highs))

    def _numbers(self, condition: Equal | AnyOf) -> list[float]:
        return [self._number(condition.field, value) for value in condition.wanted]

    @staticmethod
    def _number(field: str, value: FilterValue) -> float:
        """The value as a number; digits in a text will do, because a URL has nothing else."""
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except ValueError:
            raise BadFilter(field, f"filter on {field}: {value!r} is not a number, and {field} holds numbers") from None


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
            return [(low, high - 1)] if low < high else []
        return [(code, code) for code in self._codes_of(condition.field, condition.wanted)]

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
