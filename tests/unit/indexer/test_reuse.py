"""Reuse of vectors: each passage gets the vector of its content; missing content is encoded once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.encode import Reuse
from indexer.store import arrays as parts
from indexer.store.shards import Embeddings

# Contents 0 … 11 share halves of their hashes: equal first halves do not make equal contents.
HASHES = np.random.default_rng(0).integers(0, 256, (12, 16), dtype=np.uint8)
HASHES[4:8, :8] = HASHES[:4, :8]
HASHES[8:, 8:] = HASHES[:4, 8:]
VECTORS = np.arange(12, dtype="<f2").repeat(3).reshape(12, 3)
CONTENTS = st.integers(0, 11)


def known(contents: list[int]) -> Embeddings:
    return Embeddings(HASHES[contents], VECTORS[contents])


@given(
    corpus=st.lists(CONTENTS, min_size=1, max_size=40),
    sources=st.lists(st.lists(CONTENTS, max_size=12), max_size=4),
    part_rows=st.sampled_from([1, 3, 1000]),
)
def test_passages_get_the_vector_of_their_content(corpus: list[int], sources: list[list[int]], part_rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "ROWS_OF_A_PART", part_rows)
        patch.setattr(parts, "SCANNED_AT_ONCE", 2 * part_rows)
        reuse = Reuse(HASHES[corpus])
        left = reuse.show([known(contents) for contents in sources])
        have = {content for contents in sources for content in contents}
        assert left == sum(content not in have for content in corpus)
        missing = reuse.missing().tolist()
        assert missing == sorted({corpus.index(content) for content in corpus if content not in have})
        assert reuse.show([known([corpus[row] for row in missing])]) == 0
        assert len(reuse.missing()) == 0
        np.testing.assert_array_equal(np.concatenate(list(reuse.vectors())), VECTORS[corpus])


def test_the_first_source_with_a_vector_is_used() -> None:
    reuse = Reuse(HASHES[[5]])
    later = Embeddings(HASHES[[5]], VECTORS[[6]])
    reuse.show([known([5]), later])
    reuse.show([later])
    assert next(reuse.vectors()).tolist() == [[5, 5, 5]]


def test_a_missing_vector_is_an_error() -> None:
    reuse = Reuse(HASHES[[1, 2]])
    reuse.show([known([1])])
    with pytest.raises(ValueError, match="has no vector"):
        list(reuse.vectors())


@given(hashes=st.lists(st.integers(0, 2**64 - 1), max_size=50), bits=st.integers(0, 5))
def test_parts_have_every_row_once_in_ascending_order(hashes: list[int], bits: int) -> None:
    values = np.array(hashes, dtype=np.uint64)
    found = [parts.rows_of_part(values, bits, part) for part in range(1 << bits)]
    assert sorted(np.concatenate(found).tolist()) == list(range(len(hashes)))
    assert np.concatenate([np.sort(values[rows]) for rows in found]).tolist() == sorted(hashes)
