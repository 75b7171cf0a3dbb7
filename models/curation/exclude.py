"""Drops rows that hold text of evaluation sets, so that nothing is trained on what is measured.

Two texts count as the same if they are equal but for case, width, spaces and punctuation, or if they share a run of
words, a Chinese character being a word.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.curation.frame import Outcome, Step
from models.curation.rows import Row, passages_of, query_of
from models.encoder.spec import Side
from models.errors import BadData
from models.evaluation.sets import find_tasks

WORDS = 13
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+")
# Odd, so that no power of it vanishes.
_BASE = 0x9E3779B97F4A7C15
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Exclude(Step):
    """Drops a row if its query, title or one of its texts, negatives included, is in a set below the folders `against`.

    Memory: 8 bytes a word of the sets.
    """

    against: Sequence[Path]
    words: int = WORDS
    queries_only: bool = False
    """Whether documents of the sets do not count: training may know the list that a linking set searches."""

    name = "exclude"

    def parameters(self) -> dict[str, Any]:
        content = blake2b(self._known.data, digest_size=8).hexdigest()
        return {"words": self.words, "queries_only": self.queries_only, "against": content}

    @cached_property
    def _known(self) -> Hashes:
        """The sorted hashes of all runs of the sets."""
        tasks = [task for folder in self.against for task in find_tasks(folder)]
        parts = [texts for task in tasks for side, texts in task.texts() if side is Side.QUERY or not self.queries_only]
        # Sets that share a corpus have one list of documents.
        once = {id(texts): texts for texts in parts}.values()
        return np.unique(np.concatenate([runs(text, self.words) for texts in once for text in texts]))

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        if not self._known.size:
            raise BadData(f"{', '.join(map(str, self.against))}: no set holds a word")
        for row in rows:
            given = {"query": [query_of(row)], "text": passages_of(row), "negative": row.get("neg", [])}
            held = (part for part, texts in given.items() if any(map(self._holds, texts)))
            part = next(held, "")
            yield Outcome(dropped=f"{part} of an evaluation set") if part else Outcome([row])

    def _holds(self, text: str) -> bool:
        own = runs(text, self.words)
        at = np.minimum(np.searchsorted(self._known, own), self._known.size - 1)
        return bool((self._known[at] == own).any())


def runs(text: str, length: int) -> Hashes:
    """Hashes every run of `length` words in a text, or all of a shorter text; empty for a text without words."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).lower())
    length = min(length, len(words))
    codes = np.array([_code(word) for word in words], np.uint64)
    hashes = np.zeros(len(words) - length + 1 if words else 0, np.uint64)
    for place in range(length):
        hashes = hashes * np.uint64(_BASE) + codes[place : place + len(hashes)]
    return hashes


@lru_cache(maxsize=1 << 18)
def _code(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest())
