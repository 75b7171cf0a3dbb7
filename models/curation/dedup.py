"""Drops duplicate rows: equal but for case, width, spaces and punctuation, or near by MinHash of 5-character grams."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
from datasketch import MinHash, MinHashLSH
from numpy.typing import NDArray

from models.curation.frame import Outcome, Step
from models.curation.rows import Row, passages_of, query_of, whole_text

GRAM = 5
PERMUTATIONS, SEED = 128, 1
NEAR = 0.85
_NOT_WORD = re.compile(r"[\W_]+")
Signature = NDArray[np.uint32]


@dataclass
class Dedup(Step):
    """Keeps the first of equal rows. `near` is the Jaccard similarity from which two rows are one; 0: only equal ones.

    Memory: about 2 KB a kept row with `near`, 100 bytes without.
    """

    by: Literal["row", "query", "text"] = "row"
    near: float = NEAR
    _seen: set[bytes] = field(default_factory=set, repr=False)
    _signatures: list[Signature] = field(default_factory=list, repr=False)
    _lsh: MinHashLSH | None = field(default=None, repr=False)

    name = "dedup"
    version = 2

    def __post_init__(self) -> None:
        if self.near:
            # A recall below the threshold's own: candidates are compared by their signatures afterwards. Above 0.99 it
            # would have a single band.
            self._lsh = MinHashLSH(threshold=min(self.near, 0.99), num_perm=PERMUTATIONS, weights=(0.2, 0.8))

    def parameters(self) -> dict[str, Any]:
        hashing = {"gram": GRAM, "permutations": PERMUTATIONS, "seed": SEED} if self.near else {}
        return {"by": self.by, "near": self.near, **hashing}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        for row in rows:
            reason = self._take(self._key(row))
            yield Outcome(dropped=reason) if reason else Outcome([row])

    def resume(self, seen: int, made: Iterator[Row]) -> None:
        """Only kept rows are compared with, so the output is the whole state."""
        for row in made:
            self._take(self._key(row))

    def _key(self, row: Row) -> str:
        text = {"row": whole_text(row), "query": query_of(row), "text": "\n".join(passages_of(row))}[self.by]
        return _NOT_WORD.sub("", unicodedata.normalize("NFKC", text).casefold())

    def _take(self, key: str) -> str:
        """Returns why a row of this key is dropped; else remembers the key. An empty key equals no other."""
        if not key:
            return ""
        name = blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()
        if name in self._seen:
            return "equal to an earlier row"
        if self._lsh is not None and len(key) >= GRAM:
            grams = sorted({key[start : start + GRAM] for start in range(len(key) - GRAM + 1)})
            sketch = MinHash(num_perm=PERMUTATIONS, seed=SEED, hashfunc=zlib.crc32)
            sketch.update_batch([gram.encode(errors="surrogatepass") for gram in grams])
            signature: Signature = sketch.hashvalues.astype(np.uint32)
            if any(
                float(np.mean(self._signatures[other] == signature)) >= self.near for other in self._lsh.query(sketch)
            ):
                return f"near an earlier row (similarity {self.near:g} or more)"
            self._lsh.insert(len(self._signatures), sketch, check_duplication=False)
            self._signatures.append(signature)
        self._seen.add(name)
        return ""
