"""Splitting documents into sentences and passages: nothing is lost, nothing is too long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.curation.frame import Outcome
from models.curation.split import Split
from models.rows import count_units


def outcome(step: Split, row: dict[str, Any]) -> Outcome:
    (only,) = step.apply(iter([row]))
    return only


def texts(step: Split, text: str) -> list[str]:
    return [row["text"] for row in outcome(step, {"text": text}).rows]


def test_sentences_of_both_languages_are_split() -> None:
    step = Split(by="sentence")
    assert texts(step, "高血压是常见病。应长期服药！好。血压3.5倍") == ["高血压是常见病。", "应长期服药！", "血压3.5倍"]
    assert texts(step, "Take 2.5 mg daily. Stop if you bleed.\nSee a doctor.") == [
        "Take 2.5 mg daily.", "Stop if you bleed.", "See a doctor."
    ]  # fmt: skip


def test_passages_hold_whole_sentences_if_they_fit() -> None:
    step = Split(units=12, shortest=1)
    assert texts(step, "一二三四五。六七八九。十一十二十三十四。") == ["一二三四五。六七八九。", "十一十二十三十四。"]
    assert texts(step, "甲乙丙丁戊己，庚辛壬癸子丑，寅卯。") == ["甲乙丙丁戊己，", "庚辛壬癸子丑，寅卯。"]
    assert texts(Split(units=3, shortest=1), "one two three four five") == ["one two three", "four five"]


def test_pieces_are_numbered_and_keep_the_fields() -> None:
    row = {"id": "d7", "title": "药", "text": "每日服用一次即可。饭后温水送服为宜。短。", "source": "s", "lang": "zh"}
    made = outcome(Split(by="sentence"), row)
    assert list(made.rows) == [
        {"id": "d7#1", "title": "药", "text": "每日服用一次即可。", "source": "s", "lang": "zh"},
        {"id": "d7#2", "title": "药", "text": "饭后温水送服为宜。", "source": "s", "lang": "zh"},
    ]
    assert made.notes == {"pieces too short": 1}
    assert outcome(Split(), {"text": "短。"}).dropped == "no passage of 6 characters or more"


def test_positives_are_split_on_request() -> None:
    row = {"query": "丹沙", "pos": ["味甘微寒无毒。", "主身体五脏百病。"], "neg": ["别的东西不要。"], "source": "tcm"}
    assert "--from-pairs" in outcome(Split(), row).dropped
    made = outcome(Split(from_pairs=True), row)
    assert list(made.rows) == [
        {"source": "tcm", "title": "丹沙", "text": "味甘微寒无毒。"},
        {"source": "tcm", "title": "丹沙", "text": "主身体五脏百病。"},
    ]


@given(st.text(alphabet="血压高。，, .ab\n3!", max_size=200), st.integers(1, 20))
def test_no_character_is_lost_and_no_passage_too_long(text: str, units: int) -> None:
    made = texts(Split(units=units, shortest=1), text) if text.strip() else []
    assert "".join("".join(part.split()) for part in made) == "".join(text.split())
    assert all(count_units(part) <= units for part in made)


def test_unused_parameters_do_not_count_as_a_change() -> None:
    assert Split(by="sentence", units=5).parameters() == Split(by="sentence").parameters()
    assert Split(units=5).parameters() != Split().parameters()
    with pytest.raises(StopIteration):
        next(Split().apply(iter([])))
