"""Cleaning of texts: what is removed and what is kept."""

from __future__ import annotations

from collections import Counter

import pytest

from models.curation.clean import Clean
from models.curation.frame import Outcome
from models.errors import CareError


def cleaned(text: str) -> str:
    return Clean().text(text, Counter())


def outcome(step: Clean, row: dict[str, object]) -> Outcome:
    (only,) = step.apply(iter([row]))
    return only


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("血压&gt;140&nbsp;mmHg", "血压>140 mmHg"),
        ("甲&amp;lt;br&amp;gt;乙", "甲 乙"),
        ("<p class='x'>头痛</p><br/>发热", "头痛 发热"),
        ("p<0.05, a<b and c>d", "p<0.05, a<b and c>d"),
        ("冠心病\x04\x04高血压\ufeff\u200b", "冠心病高血压"),
        ("一　二\t\t三  \r\n\r\n\r\n\r\n四", "一 二 三\n\n四"),
        ("见下图![](images/4f.jpg)所示", "见下图 所示"),
        ("阿司匹林片说明\n版权所有 某某医院\n每日一次", "阿司匹林片说明\n每日一次"),
        ("Aspirin\nCopyright 2020 Example, all rights reserved\nOnce a day", "Aspirin\nOnce a day"),
        ("We log in the hospital every day and read more about copyrighted forms; " * 2, "same"),
    ],
)
def test_texts_are_cleaned(text: str, expected: str) -> None:
    assert cleaned(text) == (text.strip() if expected == "same" else expected)


def test_a_row_loses_only_its_useless_texts() -> None:
    row = {"query": "tsh", "pos": ["癌", "http://example.org/a.html"], "neg": ["____", "—— 。"], "source": "s", "x": 1}
    made = outcome(Clean(), row)
    assert list(made.rows) == [{"query": "tsh", "pos": ["癌"], "neg": [], "source": "s", "x": 1}]
    assert made.notes == {"text removed: only an address": 1, "text removed: hardly any letters": 2}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "\x00 \n"}, "no text left: empty"),
        ({"query": "头痛怎么办", "pos": ["吃药"]}, "no positive left: shorter than 3 words or characters"),
        ({"query": "头痛", "pos": ["吃阿司匹林"]}, "no query left: shorter than 3 words or characters"),
        ({"text": "one two three four five six seven"}, "no text left: longer than 6 words or characters"),
    ],
)
def test_a_row_without_required_texts_is_dropped_with_the_reason(row: dict[str, object], reason: str) -> None:
    assert outcome(Clean(shortest=3, longest=6), row) == Outcome(dropped=reason)


def test_given_boilerplate_is_removed() -> None:
    text = Clean(boilerplate=["寻医问药网"]).text("高血压\n寻医问药网 首页", Counter())
    assert text == "高血压"
    with pytest.raises(CareError, match="not a regular expression"):
        Clean(boilerplate=["("])


@pytest.mark.timeout(60)  # took quadratic time before: hours
@pytest.mark.parametrize("piece", ["![", "![](a"])
def test_unfinished_image_links_take_linear_time(piece: str) -> None:
    assert Clean().text(piece * 500_000, Counter()) == piece * 500_000
