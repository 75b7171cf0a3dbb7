import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import TemplateProcessing

from models.encoder.tokenizer import Tokenizer, Tokens, pad

BUNDLED = Path("models/pretrained/care-small-zh/tokenizer.json")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED, 16)


def test_a_long_text_is_truncated_and_marked_and_a_short_one_is_not(tokenizer: Tokenizer) -> None:
    short, long = tokenizer("高血压"), tokenizer("高血压" * 20)
    assert (len(short), short.truncated) == (5, False)
    assert (len(long), long.truncated) == (16, True)
    assert long.ids[0] == short.ids[0]
    assert long.ids[-1] == short.ids[-1]


def test_a_text_that_fits_exactly_is_not_marked_as_truncated(tokenizer: Tokenizer) -> None:
    assert tokenizer("药" * 14) == Tokens(tokenizer("药" * 14).ids, truncated=False)
    assert tokenizer("药" * 15).truncated


@pytest.mark.parametrize("ending", ["", "[SEP]", "[SEP] [SEP]"])
def test_truncation_equals_that_of_the_library(ending: str) -> None:
    library, special = RustTokenizer.from_file(str(BUNDLED)), [("[CLS]", 101), ("[SEP]", 102)]
    library.post_processor = TemplateProcessing(single=f"[CLS] $A {ending}".strip(), special_tokens=special)
    ours = Tokenizer.from_json(library.to_str(), 16)
    library.enable_truncation(16)
    for text in ("", "药", "头痛" * 6, "头痛" * 8, "头痛" * 30):
        assert ours(text).ids == library.encode(text).ids


def test_a_batch_gives_the_tokens_of_single_texts(tokenizer: Tokenizer) -> None:
    texts = ["糖尿病", "", "阿司匹林 100mg", "头痛" * 30]
    assert tokenizer.batch(texts) == [tokenizer(text) for text in texts]


def test_latin_letters_are_folded_to_lower_case(tokenizer: Tokenizer) -> None:
    assert tokenizer("Aspirin").ids == tokenizer("aspirin").ids


def test_offsets_cover_the_whole_text_and_do_not_change_truncation(tokenizer: Tokenizer) -> None:
    text = "头痛" * 30
    assert tokenizer.offsets(text) == [(i, i + 1) for i in range(60)]
    assert len(tokenizer(text)) == 16


def test_threads_may_count_and_truncate_at_once(tokenizer: Tokenizer) -> None:
    text = "头痛" * 30
    with ThreadPoolExecutor(4) as pool:
        spans = [pool.submit(tokenizer.offsets, text) for _ in range(200)]
        cuts = [pool.submit(tokenizer, text) for _ in range(200)]
    assert {len(one.result()) for one in spans} == {60}
    assert {len(one.result()) for one in cuts} == {16}


def test_padding_is_on_the_right_and_masked() -> None:
    ids, mask = pad([Tokens([5, 6, 7], False), Tokens([8], False)])
    np.testing.assert_array_equal(ids, [[5, 6, 7], [8, 0, 0]])
    np.testing.assert_array_equal(mask, [[1, 1, 1], [1, 0, 0]])


def test_a_long_text_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """The service cuts posted documents beside its event loop."""
    with ThreadPoolExecutor(1) as pool:
        cutting, pauses = pool.submit(tokenizer.offsets, "头痛发热，咳嗽三天。" * 20_000), 0
        while not cutting.done():
            time.sleep(0.001)
            pauses += 1
    assert pauses > 10
