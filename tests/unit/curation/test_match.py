"""CMIRB's Algorithm 1 with a scripted server: every task, dropped rows, and invented evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import models.endpoint
from models.curation.match import TASKS, Match, read_value
from models.curation.panel import Limits, Model
from models.errors import CareError
from tests.support.curation import report_in, run_in
from tests.support.grading_server import GradingServer, Reply, grading_server

ROWS = [
    {"query": "感冒吃什么", "pos": ["多 休息。多喝水。", "吃感冒药。", "别的文字", "吃维生素"], "id": 1},
    {"query": "天气如何", "pos": ["今天下雨"]},
    {"query": "没有依据", "pos": ["无关"]},
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradingServer]:
    monkeypatch.setattr(models.endpoint, "FIRST_PAUSE_SECONDS", 0.01)
    with grading_server() as server:
        yield server


def matched(server: GradingServer, folder: Path, task: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (folder / "out.jsonl").unlink(missing_ok=True)
    step = Match([Model("m", server.url)], folder / "answers.jsonl", task, limits=Limits(at_once=2))
    return run_in(folder, step, rows)


def scripted(answers: Mapping[str, object]) -> Callable[[str, str, int], str]:
    """Answers with the value of the first name that occurs in the prompt after its instructions."""

    def respond(model: str, prompt: str, number: int) -> str:
        shown = prompt[prompt.index("只输出一个 JSON") :]
        key = re.findall(r'\{"(\w+)":', shown)[0]
        return json.dumps({key: next(value for name, value in answers.items() if name in shown)}, ensure_ascii=False)

    return respond


def test_the_tasks_in_order_keep_pairs_whose_evidence_answers_the_query(server: GradingServer, tmp_path: Path) -> None:
    server.respond = scripted({"天气": 0, "": 1})
    rows = matched(server, tmp_path, "medical", ROWS)
    assert [row["query"] for row in rows] == ["感冒吃什么", "没有依据"]
    assert report_in(tmp_path)["dropped"] == {"not medical": 1}

    server.respond = scripted({"感冒": [2, 9, 1, 2, 4, 3], "": [1]})
    rows = matched(server, tmp_path, "select", rows)
    assert [row["pos"] for row in rows] == [["吃感冒药。", "多 休息。多喝水。", "吃维生素"], ["无关"]]

    server.respond = scripted(
        {"吃感冒药": ["吃感冒药。"], "休息": ["多休息。", "多吃药"], "维生素": ["吃维生素"], "": []}
    )
    rows = matched(server, tmp_path, "extract", rows)
    (row,) = rows
    assert row["evidence"] == [["吃感冒药。"], ["多休息。"], ["吃维生素"]], (
        "evidence that is not in the document is left out"
    )
    assert report_in(tmp_path)["dropped"] == {"no evidence in any passage": 1}

    server.respond = scripted({"依据：\n吃感冒药": "感冒药", "依据：\n多休息": "休息", "": ""})
    (row,) = rows = matched(server, tmp_path, "answer", rows)
    assert (row["pos"], row["answers"]) == (["吃感冒药。", "多 休息。多喝水。"], ["感冒药", "休息"])
    assert row["evidence"] == [["吃感冒药。"], ["多休息。"]]

    server.respond = scripted({"回答：休息": 0, "": 1})
    assert matched(server, tmp_path, "check", rows) == [{"query": "感冒吃什么", "pos": ["吃感冒药。"], "id": 1}]
    (stamps,) = [json.loads(line)["curated"] for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert stamps[-1]["step"] == "match"
    assert stamps[-1]["models"] == ["m"]


def test_a_known_answer_is_shown_for_finding_evidence_and_used_for_checking(
    server: GradingServer, tmp_path: Path
) -> None:
    row = {"query": "问", "pos": ["文档甲"], "answer": "标准答案", "evidence": [["甲"]], "answers": ["所写"]}
    server.respond = scripted({"": ["甲"]})
    matched(server, tmp_path, "extract", [row])
    server.respond = scripted({"": 1})
    matched(server, tmp_path, "check", [row])
    extract, check = (prompt for _, prompt in server.asked)
    assert "答案：标准答案" in extract
    assert "标准答案" in check
    assert "文档甲" not in check


def test_a_useless_answer_drops_only_its_passage(server: GradingServer, tmp_path: Path) -> None:
    server.respond = scripted({"": ["甲", "乙"]})
    server.fault = lambda model, prompt, number: Reply(200, '{"evidence": "甲"}') if "文档：\n乙" in prompt else None
    (row,) = matched(server, tmp_path, "extract", [{"query": "问", "pos": ["甲文", "乙文"]}])
    assert (row["pos"], row["evidence"]) == (["甲文"], [["甲"]])
    assert report_in(tmp_path)["notes"]["answers without use"] == 1
    assert sorted(server.asked.values()) == [1, 3]


@pytest.mark.parametrize("task", ["select", "extract", "answer", "check"])
def test_rows_that_lack_fields_of_a_task_are_named_and_cause_no_request(
    task: str, server: GradingServer, tmp_path: Path
) -> None:
    bare = {"query": "问", "pos": ["甲", "乙"], "evidence": [["甲"]], "answers": ["甲"]}
    foreign = {"query": "问", "pos": ["甲"], "evidence": None, "answers": None}
    other = {"query": "问", "pos": ["甲"], "evidence": [7], "answers": [7]}
    rows = [{"text": "文"}] if task in ("select", "extract") else [bare, foreign, other, {"text": "文"}]
    assert matched(server, tmp_path, task, rows) == []
    assert sum(report_in(tmp_path)["dropped"].values()) == len(rows)
    assert not server.asked


@pytest.mark.parametrize(
    ("task", "text", "value"),
    [
        ("medical", '好的 {"medical": 1}', 1),
        ("medical", '{"medical": true}', None),
        ("medical", '{"medical": 2}', None),
        ("select", '{"passages": [1]} 改为 {"passages": [2, 1]}', [2, 1]),
        ("select", '{"passages": ["1"]}', None),
        ("extract", '{"evidence": []}', []),
        ("answer", '{"answer": ""}', ""),
        ("check", '{"same": 1, "why": "x"}', None),
        ("check", "无法判断", None),
    ],
)
def test_only_answers_of_the_expected_form_are_accepted(task: str, text: str, value: object) -> None:
    assert read_value(text, key=TASKS[task].key, fits=TASKS[task].fits) == value


def test_matching_takes_exactly_one_model(tmp_path: Path) -> None:
    with pytest.raises(CareError, match="one model matches"):
        Match([Model("a", "http://x"), Model("b", "http://x")], tmp_path / "answers.jsonl", "check")
