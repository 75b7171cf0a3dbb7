"""Times a words search under filters: `python -m tests.bench.words [ROWS]`.

Rows are random Chinese-like texts. A filter allows a share of the rows, at random or, at worst, those that match the
query least. Prints milliseconds of processor time, median and maximum over some queries.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.lexical import LexicalIndex

SHARES = (0.001, 0.1, 0.5, 0.9)
CHARACTERS, LENGTH, QUERY = 3000, 80, 6
QUERIES, K = 9, 200


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 60_000
    randomly = np.random.default_rng(0)
    texts = ["".join(chr(0x4E00 + code) for code in _codes(randomly, LENGTH)) for _ in range(rows)]
    index = LexicalIndex.build(texts)
    queries = [text[start : start + QUERY] for text, start in zip(texts[::997], range(QUERIES), strict=False)]
    print(f"{rows} rows, k {K}, {len(queries)} queries, milliseconds of processor time")
    print(f"no filter: {_timed(index, queries, [None] * len(queries))}")
    orders = [index.search(query, rows)[0] for query in queries]
    for share in SHARES:
        alike = randomly.random(rows) < share
        against = [_without(order[: int(rows * (1 - share))], rows) for order in orders]
        print(f"{share:.1%} at random: {_timed(index, queries, [alike] * len(queries))}")
        print(f"{share:.1%} against the query: {_timed(index, queries, against)}")


def _codes(randomly: np.random.Generator, count: int) -> list[int]:
    """Characters as unevenly frequent as in a language."""
    codes: list[int] = np.minimum(CHARACTERS * randomly.random(count) ** 3, CHARACTERS - 1).astype(int).tolist()
    return codes


def _without(forbidden: NDArray[np.int64], rows: int) -> NDArray[np.bool_]:
    allowed = np.ones(rows, np.bool_)
    allowed[forbidden] = False
    return allowed


def _timed(index: LexicalIndex, queries: list[str], masks: Sequence[NDArray[np.bool_] | None]) -> str:
    spent = []
    for query, allowed in zip(queries, masks, strict=True):
        began = time.process_time()
        index.search(query, K, allowed)
        spent.append(1000 * (time.process_time() - began))
    return f"{np.median(spent):.1f}, at most {max(spent):.1f}"


if __name__ == "__main__":
    main()
