"""Rows that hold text of evaluation sets: equal texts and shared runs go, everything else stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.curation.exclude import Exclude, runs
from models.errors import BadData
from models.evaluation.sets import write_retrieval
from tests.support.curation import report_in, run_in, write_lines

QUERY = "胃酸过多怎么办"
DOCUMENT = "胃酸过多的人应当少吃甜食和油炸食品，晚饭不要吃得太晚。"
ENGLISH = "Patients who take warfarin should keep the amount of vitamin K in their food the same every week."


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    write_retrieval(tmp_path / "sets" / "zh", [DOCUMENT, "血压计"], [(QUERY, {DOCUMENT})])
    write_retrieval(tmp_path / "sets" / "en", [ENGLISH], [("warfarin and food", {ENGLISH})])
    (tmp_path / "sets" / "sts").mkdir()
    pairs = [{"a": "咳嗽三天", "b": "发烧三天", "score": 0}, {"a": "头疼", "b": "头痛", "score": 1}]
    write_lines(tmp_path / "sets" / "sts" / "same.jsonl", pairs)
    return tmp_path / "sets"


def kept(folder: Path, sets: Path, rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return run_in(folder, Exclude([sets], **options), rows)


def test_equal_texts_are_dropped_whatever_their_punctuation(tmp_path: Path, sets: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"query": "胃酸过多，怎么办？", "pos": ["答"]},
        {"title": "血 压 计", "text": "量血压的仪器。"},
        {"query": "问", "pos": ["答", "ＷＡＲＦＡＲＩＮ and FOOD!"]},
        {"query": "问", "pos": ["答"], "neg": ["发烧三天"]},
        {"query": "胃酸", "pos": ["血压计的用法"]},
    ]
    assert kept(tmp_path, sets, rows) == rows[-1:], "a short text of a set may stand within a longer one"
    dropped = {"query of an evaluation set": 2, "text of an evaluation set": 1, "negative of an evaluation set": 1}
    assert report_in(tmp_path)["dropped"] == dropped


def test_thirteen_words_in_a_row_are_dropped_and_twelve_are_not(tmp_path: Path, sets: Path) -> None:
    words = ENGLISH.split()
    rows = [
        {"text": "前文。" + DOCUMENT[2:16].replace("人", "人、") + "后文"},
        {"text": "前文。" + DOCUMENT[2:14] + "后文"},
        {"text": "Some say: " + " ".join(words[3:16]) + " of it"},
        {"text": "Some say: " + " ".join(words[3:15]) + " of it"},
    ]
    assert kept(tmp_path, sets, rows) == [rows[1], rows[3]]
    assert kept(tmp_path, sets, rows, words=12) == []


def test_queries_only_leaves_the_documents_of_a_set(tmp_path: Path, sets: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"query": "量血压用什么", "pos": ["血压计"]}, {"query": QUERY, "pos": ["答"]}, {"text": DOCUMENT}
    ]  # fmt: skip
    assert kept(tmp_path, sets, rows, queries_only=True) == [rows[0], rows[2]]


def test_another_set_makes_the_step_begin_anew(tmp_path: Path, sets: Path) -> None:
    rows = [{"text": "血压计"}, {"text": "体温计"}]
    assert kept(tmp_path, sets, rows) == rows[1:]
    write_retrieval(sets / "zh", [DOCUMENT, "体温计"], [(QUERY, {DOCUMENT})])
    assert kept(tmp_path, sets, rows) == rows[:1]


def test_sets_without_a_word_are_refused(tmp_path: Path) -> None:
    write_retrieval(tmp_path / "sets", ["……"], [("？", {"……"})])
    with pytest.raises(BadData, match="no set holds a word"):
        kept(tmp_path, tmp_path / "sets", [{"text": "体温计"}])


def test_runs_are_those_of_every_place() -> None:
    text = "一二三四五"
    assert runs(text, 3).tolist() == [int(runs(text[at : at + 3], 3)[0]) for at in range(3)]
    assert runs(text, 9).tolist() == runs(text, 5).tolist()
    assert runs("……", 3).size == 0
    assert runs("12 3", 1).tolist() != runs("1 23", 1).tolist()
