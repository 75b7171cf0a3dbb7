"""A few texts in memory are scored as in the large index."""

from __future__ import annotations

import random

import numpy as np
import pytest

from models.lexical import LexicalIndex, Postings, rounded_length

LETTERS = "高血压糖尿病用药饮食发热心肺复苏骨折 abc def"
QUERIES = ["高血压吃什么药", "abc 高高", "糖尿病人的饮食 def", "nothing of it"]


def texts(count: int, seed: int) -> list[str]:
    """Makes texts of all lengths, so that every step of the rounding occurs."""
    draw = random.Random(seed)
    return ["".join(draw.choices(LETTERS, k=draw.randint(0, 900))) for _ in range(count)]


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    return texts(120, 1)


@pytest.fixture(scope="module")
def index(corpus: list[str]) -> LexicalIndex:
    return LexicalIndex.build(corpus)


def expected(index: LexicalIndex, query: str) -> np.ndarray:
    rows, scores = index.search(query, len(index))
    found = np.zeros(len(index), np.float32)
    found[rows] = scores
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_texts_of_the_index_score_as_the_index_scores_them(index: LexicalIndex, corpus: list[str], query: str) -> None:
    found = Postings.of(corpus).score(index.weights(query), index)
    np.testing.assert_allclose(found, expected(index, query), rtol=1e-5)


MANY = "高高高 1.5 ＡＢＣ " + "".join(map(chr, range(0x4E00, 0x4F00)))  # terms are then counted in another way


@pytest.mark.parametrize("query", [*QUERIES, "高高高 1.5 ＡＢＣ", "㿠白", MANY])
def test_the_terms_of_a_query_alone_score_as_all_do(index: LexicalIndex, query: str) -> None:
    some = [*texts(60, 2), "高高高高 高 高高", "1.5 1.5.2 5 ABC ａｂｃ_abc", "㿠白 豈更", ""]
    weights = index.weights(query)
    found, all_terms = Postings.of(some, weights), Postings.of(some)
    assert found.lengths.tolist() == all_terms.lengths.tolist()
    assert found.score(weights, index).tolist() == all_terms.score(weights, index).tolist()
    assert set(found.hashes.tolist()) <= {hash(term) for term in weights}


@pytest.mark.parametrize("query", QUERIES)
def test_joined_parts_equal_their_kept_rows(index: LexicalIndex, corpus: list[str], query: str) -> None:
    parts = [Postings.of(corpus[:50]), Postings.of(corpus[50:60]), Postings.of(corpus[60:])]
    kept = np.random.default_rng(3).random(len(corpus)) < 0.5
    masks = [kept[:50], np.zeros(10, np.bool_), kept[60:]]
    found = Postings.joined(parts, masks).score(index.weights(query), index)
    np.testing.assert_allclose(found, expected(index, query)[np.concatenate(masks)], rtol=1e-5)


def test_an_unknown_word_counts_as_the_rarest(index: LexicalIndex) -> None:
    weights = index.weights("缬沙坦 高")
    assert weights["缬沙"] == max(weights.values())
    assert Postings.of(["缬沙坦", "阿司匹林"]).score(weights, index).tolist()[1] == 0


def test_an_empty_index_has_a_nonzero_average_length() -> None:
    assert LexicalIndex.build([""]).average_length == 1.0


def test_lengths_are_rounded_down_to_four_digits() -> None:
    assert [rounded_length(length) for length in (0, 23, 24, 40, 41, 42, 100, 5000)] == [
        0,
        23,
        24,
        40,
        40,
        42,
        96,
        4632,
    ]
