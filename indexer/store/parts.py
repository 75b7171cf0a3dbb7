"""Hashes taken in parts, so that sorting and joining millions of them takes the memory of one part.

A part is a range of hashes. Hashes are spread evenly, so parts are of like size, and ascending parts of ascending
hashes are ascending hashes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.store.arrays import Array

ROWS_OF_A_PART = 1 << 17
SCANNED_AT_ONCE = 1 << 20


def part_bits(rows: int) -> int:
    """How many leading bits of a hash name its part, so that `rows` hashes fall into parts of a fair size."""
    return (rows // ROWS_OF_A_PART).bit_length()


def rows_of_part(hashes: Array, bits: int, part: int) -> NDArray[np.int64]:
    """The rows, ascending, of the `hashes` (rows,) uint64 whose first `bits` bits are `part`."""
    shift = np.uint64(64 - bits)  # numpy says that a number moved by all its 64 bits is 0, the only part there is
    starts = range(0, len(hashes), SCANNED_AT_ONCE)
    found = [np.flatnonzero(hashes[start : start + SCANNED_AT_ONCE] >> shift == part) + start for start in starts]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)
