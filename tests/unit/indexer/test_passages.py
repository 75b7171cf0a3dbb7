"""Cutting documents into passages: nothing is lost, nothing is too long, and cuts fall at sentence ends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.errors import BadBuild
from indexer.passages import Budget, Cutter
from models.encoder.spec import TOKENIZER_FILE
from models.encoder.tokenizer import Tokenizer
from tests.support.fast_encoder import BUNDLED

TEXTS = st.text(
    st.sampled_from("高血压患者服药。！？；\n 3.5mg abnormalities internationalization, x"), min_size=1, max_size=400
)
TITLES = st.text(st.sampled_from("原发性高血压 hypertension"), max_size=80)


def cut(tokenizer: Tokenizer, title: str, text: str, budget: Budget, instruction: str = "") -> list[tuple[int, int]]:
    (spans,) = Cutter(tokenizer, instruction, budget).cut([title], [text])
    return spans


@given(title=TITLES, text=TEXTS, tokens=st.integers(24, 64), overlap=st.integers(0, 6))
def test_passages_cover_the_text_in_order(
    tokenizer: Tokenizer, title: str, text: str, tokens: int, overlap: int
) -> None:
    spans = cut(tokenizer, title, text, Budget(tokens, overlap))
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    for (start, end), (next_start, next_end) in pairwise(spans):
        assert start < next_start <= end < next_end
    assert all(start < end for start, end in spans)


@given(title=TITLES, text=TEXTS, tokens=st.integers(24, 64), instruction=st.sampled_from(["", "为检索表示："]))
def test_the_encoder_reads_every_passage_whole(
    tokenizer: Tokenizer, title: str, text: str, tokens: int, instruction: str
) -> None:
    cutter = Cutter(tokenizer, instruction, Budget(tokens, 4))
    (spans,) = cutter.cut([title], [text])
    for start, end in spans:
        assert len(tokenizer(instruction + cutter.compose(title, text[start:end]))) <= tokens


@given(text=st.text(st.sampled_from("高血压患者服药"), min_size=100, max_size=300), overlap=st.integers(0, 8))
def test_neighbours_share_the_overlap(tokenizer: Tokenizer, text: str, overlap: int) -> None:
    """One token a character and no sentence end, so the overlap can be counted in characters."""
    spans = cut(tokenizer, "", text, Budget(40, overlap))
    assert len(spans) > 1
    for (_, end), (next_start, _) in pairwise(spans):
        assert end - next_start == overlap
    assert all(end - start == 38 for start, end in spans[:-1])  # 40 minus [CLS] and [SEP]


def test_a_short_document_is_one_passage(tokenizer: Tokenizer) -> None:
    assert cut(tokenizer, "标题", " 一句话。\n", Budget(512, 64)) == [(0, 6)]


def test_cuts_prefer_sentence_ends(tokenizer: Tokenizer) -> None:
    text = "高血压患者应当长期服药。" * 12
    spans = cut(tokenizer, "", text, Budget(64, 8))
    assert len(spans) > 2
    assert all(text[end - 1] == "。" for _, end in spans)


def test_passages_begin_with_a_sentence_if_the_overlap_has_one(tokenizer: Tokenizer) -> None:
    text = "患者应当长期服药。" * 30
    spans = cut(tokenizer, "", text, Budget(96, 24))
    assert len(spans) > 2
    for (_, end), (next_start, _) in pairwise(spans):
        assert text[next_start - 1] == "。"
        assert 12 <= end - next_start <= 24


def test_a_full_stop_inside_a_number_is_not_a_sentence_end(tokenizer: Tokenizer) -> None:
    text = "one two three. " + "take 3.5 mg and 7.5 ml and 2.5 g " * 4
    for _, end in cut(tokenizer, "", text, Budget(32, 0)):
        assert not (text[end - 1] == "." and text[end : end + 1].isdigit())


def test_newlines_and_english_full_stops_are_sentence_ends(tokenizer: Tokenizer) -> None:
    words = "one two three four five six seven eight nine ten"
    first, second = f"{words} stop. ", f"{words} line\n"
    text = first + second + words
    tokens = len(tokenizer(first)) + 2  # room for a little more than a sentence
    assert [text[start:end] for start, end in cut(tokenizer, "", text, Budget(tokens, 0))] == [first, second, words]


def test_a_very_long_title_is_truncated_and_leaves_room_for_text(tokenizer: Tokenizer) -> None:
    cutter = Cutter(tokenizer, "", Budget(64, 8))
    title, text = "很" * 500, "正文内容" * 50
    (spans,) = cutter.cut([title], [text])
    composed = cutter.compose(title, text[slice(*spans[0])])
    assert composed.startswith("很" * 31 + "\n")
    assert len(tokenizer(composed)) == 64


def test_a_passage_without_a_title_is_encoded_unchanged(tokenizer: Tokenizer) -> None:
    assert Cutter(tokenizer, "", Budget(64, 8)).compose("", "正文") == "正文"


@pytest.mark.parametrize("title", ["骨折固定", "很" * 500])
def test_a_title_alone_is_one_passage(tokenizer: Tokenizer, title: str) -> None:
    cutter = Cutter(tokenizer, "", Budget(64, 8))
    assert cutter.cut([title], [""]) == [[(0, 0)]]
    assert cutter.compose(title, "") == title[:31]


def test_an_encoder_with_fewer_tokens_does_not_change_the_cuts(tokenizer: Tokenizer) -> None:
    short = Tokenizer.load(BUNDLED / TOKENIZER_FILE, 24)
    for repeated in (1, 4, 12):  # read whole; read in part, though one passage; several passages
        text = "高血压患者应当长期服药。" * repeated
        assert cut(short, "标题", text, Budget(64, 8)) == cut(tokenizer, "标题", text, Budget(64, 8))


@pytest.mark.parametrize(
    ("tokens", "overlap", "reason"),
    [
        (64, 17, "at most a quarter; give --overlap 0 to 16"),
        (64, -1, "at most a quarter"),
        (3, 0, "leave no room"),
    ],
)
def test_impossible_budgets_are_refused(tokenizer: Tokenizer, tokens: int, overlap: int, reason: str) -> None:
    with pytest.raises(BadBuild, match=reason):
        Cutter(tokenizer, "", Budget(tokens, overlap))


def test_an_encoder_with_few_tokens_gets_a_smaller_overlap() -> None:
    assert [Budget.of(tokens, None).overlap for tokens in (512, 256, 128)] == [64, 64, 32]
    assert Budget.of(128, 0).overlap == 0
