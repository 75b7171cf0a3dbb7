"""Texts tokenised by several processes have the tokens of one process, in the same order."""

import os
from pathlib import Path

import numpy as np

from models.encoder.tokenizer import Tokenizer, tokenise

BUNDLED = Path("models/pretrained/care-small-zh/tokenizer.json")
CHUNKS = [
    [f"第{number}条：高血压患者应当低盐饮食" * (number % 3 + 1) for number in range(first, first + 7)]
    for first in range(0, 70, 7)
]


def test_several_processes_give_the_tokens_of_one() -> None:
    tokenizer = Tokenizer.load(BUNDLED, 24)
    before = os.environ.get("RAYON_NUM_THREADS")
    alone = list(tokenise(CHUNKS, 70, tokenizer))
    together = list(tokenise(CHUNKS, 70, tokenizer, processes=3))
    assert len(together) == len(CHUNKS)
    for (ids, lengths), (expected, sizes) in zip(together, alone, strict=True):
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(lengths, sizes)
        assert lengths.max() == 24
    assert os.environ.get("RAYON_NUM_THREADS") == before
