"""BM25 over a few texts in memory, scored as if they stood in another, large index: by its rarities and its lengths.

So the rows of both can be ranked together. Plain arrays that never change. Knows nothing of documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.lexical import K1, B, LexicalIndex, terms

Scores = NDArray[np.float32]
# Lengths up to here are kept as they are, longer ones to four binary digits, as the large index keeps them.
EXACT_LENGTHS = 24
LENGTH_BITS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Postings:
    """Which rows hold which terms: three arrays of one length, ascending by the term's hash, and each row's length.

    The hashes are the interpreter's, of 64 bits, and mean nothing outside this process.
    """

    hashes: NDArray[np.int64]
    rows: NDArray[np.int32]
    counts: Scores
    lengths: Scores

    @classmethod
    def of(cls, texts: Sequence[str]) -> Postings:
        found = [Counter(terms(text)) for text in texts]
        sizes = [len(counts) for counts in found]
        hashes = np.fromiter((hash(term) for counts in found for term in counts), np.int64, sum(sizes))
        counts = np.fromiter((count for counts in found for count in counts.values()), np.float32, sum(sizes))
        lengths = np.array([rounded_length(counts.total()) for counts in found], np.float32)
        return cls._sorted(hashes, np.repeat(np.arange(len(texts), dtype=np.int32), sizes), counts, lengths)

    @classmethod
    def joined(cls, parts: Sequence[Postings], kept: Sequence[NDArray[np.bool_]]) -> Postings:
        """The kept rows of all parts, one after the other; `kept` is a boolean array over the rows of each."""
        numbers = [np.cumsum(mask) - 1 for mask in kept]
        starts = np.cumsum([0, *(np.count_nonzero(mask) for mask in kept)])
        entries = [mask[part.rows] for part, mask in zip(parts, kept, strict=True)]
        rows = [
            (number[part.rows[own]] + start).astype(np.int32)
            for part, number, own, start in zip(parts, numbers, entries, starts.tolist(), strict=False)
        ]
        return cls._sorted(
            np.concatenate([part.hashes[own] for part, own in zip(parts, entries, strict=True)]),
            np.concatenate(rows),
            np.concatenate([part.counts[own] for part, own in zip(parts, entries, strict=True)]),
            np.concatenate([part.lengths[mask] for part, mask in zip(parts, kept, strict=True)]),
        )

    @classmethod
    def _sorted(cls, hashes: NDArray[np.int64], rows: NDArray[np.int32], counts: Scores, lengths: Scores) -> Postings:
        order = np.argsort(hashes, kind="stable")  # parts are sorted already, which this kind makes use of
        return cls(hashes[order], rows[order], counts[order], lengths)

    def score(self, weights: dict[str, float], among: LexicalIndex) -> Scores:
        """The score of every row for a query of these weights, 0 where it shares no term, as a row of `among`."""
        wanted = np.array([hash(term) for term in weights], np.int64)
        first, end = (np.searchsorted(self.hashes, wanted, side) for side in ("left", "right"))
        sizes = end - first
        # The entries of all terms at once: a handful of array operations, however many terms there are.
        entries = np.arange(sizes.sum()) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
        rows, counts = self.rows[entries], self.counts[entries]
        damping = K1 * (1 - B + B * self.lengths[rows] / np.float32(among.average_length))
        shares = np.repeat(np.array(list(weights.values()), np.float32), sizes) * counts / (counts + damping)
        return np.bincount(rows, shares, len(self.lengths)).astype(np.float32)


def rounded_length(length: int) -> int:
    """A length as the large index keeps it, in one byte."""
    rest = length - EXACT_LENGTHS
    if rest < 0:
        return length
    shift = max(0, rest.bit_length() - LENGTH_BITS)
    return EXACT_LENGTHS + (rest >> shift << shift)
