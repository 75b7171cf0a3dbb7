"""Snippets: the window with most of the query in it, and marks exactly at the words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.search.results import ELLIPSIS, LATIN_WINDOW, LONGEST_WORD, MAX_TERMS, WINDOW, make_snippet, marked_terms


def marks(text: str, query: str) -> list[str]:
    snippet = make_snippet(text, (0, len(text)), marked_terms(query))
    return [snippet.text[start:end] for start, end in snippet.highlights]


@pytest.mark.parametrize(
    ("text", "query", "expected"),
    [
        ("氨氯地平治疗高血压。", "高血压", ["高血压"]),
        ("血压高，也就是高血压", "高血压吃什么药", ["血压", "高血压"]),
        ("Aspirin in the morning", "IN ASPIRIN", ["Aspirin"]),
        ("Insulin is what lowers sugar", "what is insulin", ["Insulin"]),
        ("什么都吃，怎么办？高血压吗", "高血压怎么办吗", ["高血压"]),
        ("提高免疫力可降低高血压风险", "高血压", ["高血压"]),
        ("这种病的人，糖尿病的饮食", "糖尿病的饮食", ["糖尿病", "饮食"]),
        ("要怎么办", "怎么办", ["怎么办"]),
        ("aspirin", "in", []),
        ("用ＣＴ检查", "ct", ["ＣＴ"]),
        ("维生素Ｃ²", "c2", ["Ｃ²"]),
        ("İstanbul 高血压", "高血压", ["高血压"]),
        ("38.5度", "38.5", ["38.5"]),
        ("药", "药", ["药"]),
        ("药物", "吃药", []),
        ("没有相同的词", "asthma", []),
        ("高血压", "", []),
        ("高高高高", "高高", ["高高高高"]),
    ],
)
def test_marks_cover_the_words_of_the_query(text: str, query: str, expected: list[str]) -> None:
    assert marks(text, query) == expected


def test_a_short_passage_is_shown_whole() -> None:
    assert make_snippet("短。", (0, 2), []).text == "短。"


def test_a_long_passage_is_cut_around_the_matches() -> None:
    text = "无关文字。" * 60 + "阿司匹林可以预防血栓。" + "其他内容。" * 60
    snippet = make_snippet(text, (0, len(text)), marked_terms("阿司匹林 血栓"))
    assert snippet.text.startswith(ELLIPSIS)
    assert snippet.text.endswith(ELLIPSIS)
    assert [snippet.text[start:end] for start, end in snippet.highlights] == ["阿司匹林", "血栓"]
    assert len(snippet.text) <= WINDOW + 2


def test_several_different_terms_outweigh_one_repeated_term() -> None:
    text = "血栓" * 20 + "。" * 200 + "阿司匹林预防血栓" + "。" * 200
    snippet = make_snippet(text, (0, len(text)), marked_terms("阿司匹林 血栓"))
    assert "阿司匹林预防血栓" in snippet.text


def test_a_snippet_does_not_split_words() -> None:
    text = "pneumonia " * 30 + "aspirin " + "pneumonia " * 30
    snippet = make_snippet(text, (0, len(text)), ["aspirin"])
    assert set(snippet.text.strip(ELLIPSIS).split()) == {"pneumonia", "aspirin"}


def test_a_passage_inside_a_document_shows_that_it_is_a_part() -> None:
    text = "前文。，中间的话，后文。"
    snippet = make_snippet(text, (3, 9), marked_terms("中间"))
    assert snippet.text == "…中间的话，…"
    assert snippet.highlights == [(1, 3)]


texts = st.text(alphabet="高血压药ab İ²Ａ，。\n", max_size=400)


@given(
    text=texts,
    query=st.text(alphabet="高血压药abi a", max_size=30),
    start=st.integers(0, 400),
    length=st.integers(0, 400),
)
def test_marks_are_always_inside_the_snippet_sorted_and_apart(text: str, query: str, start: int, length: int) -> None:
    span = (min(start, len(text)), min(start + length, len(text)))
    snippet = make_snippet(text, span, marked_terms(query))
    shown = snippet.text.removeprefix(ELLIPSIS).removesuffix(ELLIPSIS)
    assert shown in text[slice(*span)].replace("\n", " ")
    assert len(shown) <= LATIN_WINDOW * 7 // 6 + LONGEST_WORD
    end_before = -1
    for begin, end in snippet.highlights:
        assert end_before < begin < end <= len(snippet.text)
        assert ELLIPSIS not in snippet.text[begin:end]
        end_before = end


def test_a_snippet_begins_at_a_nearby_sentence() -> None:
    text = "很长的前文，" * 30 + "还有尾巴。\n\n何时就医：血压反复升高应到门诊。" + "后面的话，" * 40
    snippet = make_snippet(text, (0, len(text)), marked_terms("血压"))
    assert snippet.text.startswith(f"{ELLIPSIS}何时就医：血压")


def test_a_snippet_begins_at_a_clause_if_no_sentence_is_near() -> None:
    text = "一二三四五六七八九，" * 30 + "阿司匹林，" + "一二三四五六七八九，" * 30
    snippet = make_snippet(text, (0, len(text)), marked_terms("阿司匹林"))
    assert snippet.text.startswith(f"{ELLIPSIS}一二三四五六七八九，")


def test_a_passage_that_begins_inside_a_sentence_is_shown_from_the_next_one() -> None:
    text = "前面的话" * 10 + "的尾巴。第二句话从这里开始。" + "第三句话。" * 60
    snippet = make_snippet(text, (30, len(text)), [])
    assert snippet.text.startswith(f"{ELLIPSIS}第二句话从这里开始。")


def test_a_snippet_is_one_line_and_ends_at_a_nearby_sentence() -> None:
    text = "第一行\n第二行。\n" + "中间的一句话。" * 12 + "最后一句很长很长" * 40
    snippet = make_snippet(text, (0, len(text)), marked_terms("第一行"))
    assert snippet.text.startswith("第一行 第二行。 中间")
    assert snippet.text.endswith(f"中间的一句话。{ELLIPSIS}")


def test_an_english_snippet_is_longer() -> None:
    text = "Some words about asthma that go on. " + "Others follow it here. " * 40
    snippet = make_snippet(text, (0, len(text)), marked_terms("asthma"))
    assert WINDOW < len(snippet.text) <= LATIN_WINDOW * 7 // 6 + 2
    assert snippet.text.startswith("Some words")
    assert snippet.text.endswith(f"it here.{ELLIPSIS}")


def test_a_very_long_query_is_limited_to_few_terms() -> None:
    assert len(marked_terms("".join(map(chr, range(0x4E00, 0x5E00))))) == MAX_TERMS


def test_a_term_longer_than_the_window_is_ignored() -> None:
    text = "a" * 300 + " b " + "a" * 300
    assert make_snippet(text, (0, len(text)), marked_terms("a" * 300)).highlights == []
