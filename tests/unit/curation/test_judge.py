"""Judging by a panel over HTTP: consensus, kappa, and failing servers of every kind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import models.endpoint
from cli import main
from models.curation import asking, judge, panel
from models.curation.frame import Files, run_step
from models.curation.judge import JudgeRows, fleiss_kappa, read_grades
from models.curation.panel import Limits, Model
from models.errors import CareError
from models.prompts import load
from tests.support.grading_server import USAGE, GradingServer, Reply, failing, grading_server

ROWS = [
    {"query": "高血压吃什么药", "pos": ["氨氯地平4", "无关的话0"], "neg": ["硝苯地平4", "多喝水1", "有争议3"], "id": 7},
    {"query": "感冒", "pos": ["只是相关1"], "neg": []},
    {"title": "糖尿病", "text": "二甲双胍4"},
    {"text": "没有标题4"},
]


@pytest.fixture
def server() -> Iterator[GradingServer]:
    with grading_server() as server:
        yield server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.endpoint, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(models.endpoint, "LONGEST_PAUSE_SECONDS", 0.05)


def judged(server: GradingServer, folder: Path, rows: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Returns the output for rows, without the field of the steps."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_step(step(server, folder, **more), files_of(folder))
    made = [json.loads(line) for line in files_of(folder).out.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in row.items() if name != "curated"} for row in made]


def step(server: GradingServer, folder: Path, **more: Any) -> JudgeRows:  # noqa: ANN401
    judges = [Model(model, server.url) for model in more.pop("models", "ab")]
    limits = Limits(at_once=4, timeout_seconds=more.pop("timeout_seconds", 20))
    return JudgeRows(judges, folder / "answers.jsonl", limits=limits, **more)


def files_of(folder: Path) -> Files:
    return Files([folder / "rows.jsonl"], folder / "out.jsonl")


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(files_of(folder).report.read_text(encoding="utf-8"))
    return report


def test_only_passages_on_which_all_judges_agree_are_kept(server: GradingServer, tmp_path: Path) -> None:
    assert judged(server, tmp_path, ROWS) == [
        {
            "query": "高血压吃什么药", "pos": ["氨氯地平4", "硝苯地平4"], "neg": ["无关的话0", "多喝水1"], "id": 7,
            "judged": {"pos": [[4, 4], [4, 4]], "neg": [[0, 0], [1, 1]]}, "disputed": ["有争议3"],
        },
        {"title": "糖尿病", "text": "二甲双胍4", "judged": {"pos": [[4, 4]]}},
    ]  # fmt: skip
    report = report_of(tmp_path)
    assert report["dropped"] == {
        "no passage is relevant to every judge": 1,
        "a document without a title: there is no query to judge it by": 1,
    }
    assert report["flagged"] == {"judges disagree on a passage": 1}
    assert "有争议3" in report["samples"]["judges disagree on a passage"][0]
    notes = report["notes"]
    assert (notes["positives kept"], notes["negatives that are relevant"]) == (2, 1)
    assert (notes["votes 3 2"], notes["votes 4 4"]) == (1, 3)
    assert report["agreement"]["same_grade"] == {"a and b": 6 / 7}
    assert 0 < report["agreement"]["kappa_relevant"] < 1
    labels = report["labels"]
    assert labels["queries"] == 3
    assert (labels["positives"], labels["judged_positives"]) == (4 / 3, 1)
    assert (labels["false_positives"], labels["false_negatives"]) == (2 / 3, 1 / 3)
    assert labels["agreement"] == 3 / 6, "two positives and a negative of six that are not disputed"


def test_a_relevant_negative_can_be_dropped(server: GradingServer, tmp_path: Path) -> None:
    (row, _) = judged(server, tmp_path, ROWS, promote=False)
    assert row["pos"] == ["氨氯地平4"]
    assert row["neg"] == ["无关的话0", "多喝水1"]


def test_the_origin_of_a_row_includes_the_prompt_and_the_judges(server: GradingServer, tmp_path: Path) -> None:
    judged(server, tmp_path, ROWS)
    (stamp,) = json.loads(files_of(tmp_path).out.read_text(encoding="utf-8").splitlines()[0])["curated"]
    assert stamp["models"] == ["a", "b"]
    assert stamp["prompt"] == step(server, tmp_path).parameters()["prompt"]
    assert stamp["prompt"] != step(server, tmp_path, language="en").parameters()["prompt"]


def test_passages_are_judged_in_batches_and_only_once(server: GradingServer, tmp_path: Path) -> None:
    rows = [{"query": f"问{n}", "pos": [f"甲{n}号4"], "neg": [f"乙{k}号{k % 3}" for k in range(6)]} for n in range(5)]
    rows.append(rows[0])  # an equal row
    first = judged(server, tmp_path, rows, batch=3)
    assert [len(row["neg"]) for row in first] == [6] * 6
    assert set(server.asked.values()) == {1}
    assert len(server.asked) == 5 * 3 * 2
    files_of(tmp_path).out.unlink()
    assert judged(server, tmp_path, rows, batch=3) == first
    assert set(server.asked.values()) == {1}


def test_a_failing_server_loses_no_row_and_judges_none_twice(server: GradingServer, tmp_path: Path) -> None:
    rows = [{"query": f"问题{n}", "pos": [f"答{n}是4"], "neg": [f"乙{n}是0", f"丙{n}是3"]} for n in range(20)]
    calm, faulty = tmp_path / "calm", tmp_path / "faulty"
    calm.mkdir(), faulty.mkdir()
    expected = judged(server, calm, rows)
    assert len(expected) == 20
    server.asked.clear(), server.graded.clear()
    server.paid, server.fault = 0, failing
    assert judged(server, faulty, rows, timeout_seconds=2) == expected
    assert set(server.graded.values()) == {1}
    assert len(server.graded) == 20 * 2
    notes = report_of(faulty)["notes"]
    counted = sum(notes[f"prompt tokens of {model}"] for model in "ab")
    assert counted == USAGE["prompt_tokens"] * server.paid > USAGE["prompt_tokens"] * 40
    assert "passages without a grade of every judge" not in notes


def test_answers_are_counted_in_money_with_the_prices_of_the_command(
    server: GradingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"query": "问", "pos": ["答4"], "neg": ["乙0"]}), encoding="utf-8")
    judges = ["--judge", f"a@{server.url}", "--judge", f"b@{server.url}"]
    given = ["curate", "judge", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out.jsonl"), *judges]
    assert main([*given, "--price", "a", "2000", "8000"]) == 0
    expected = (2000 * USAGE["prompt_tokens"] + 8000 * USAGE["completion_tokens"]) / 1e6
    assert report_of(tmp_path)["cost"] == {"a": pytest.approx(expected)}
    assert 'cost: {"a": ' in capsys.readouterr().err
    for wrong in (["c", "1", "1"], ["a", "x", "1"], ["a", "-1", "1"], ["a", "nan", "1"]):
        assert main([*given, "--price", *wrong]) == 1
        assert "--price" in capsys.readouterr().err


@pytest.mark.parametrize(("takes", "rejects"), [("json_schema", 422), ("json_object", 500), ("", 400)])
def test_the_response_format_is_sent_if_the_server_supports_it(
    server: GradingServer, tmp_path: Path, takes: str, rejects: int
) -> None:
    server.takes, server.rejects = [takes], rejects
    rows = [{"query": f"问{n}", "pos": [f"答{n}是4"], "neg": [f"乙{n}是0"]} for n in range(20)]
    assert len(judged(server, tmp_path, rows, models="a")) == 20
    assert set(server.formats[-10:]) == {takes}, "a form that was refused is not tried again"
    assert sum(server.asked.values()) == 20, "a refused form costs no answer"
    grade = {"type": "integer", "enum": [0, 1, 2, 3, 4]}
    told = {"type": "object", "properties": {"1": grade, "2": grade}, "required": ["1", "2"],
            "additionalProperties": False}  # fmt: skip
    assert server.schemas == [told] * (20 if takes else 0)


def test_a_request_that_is_rejected_in_every_form_ends_the_run(server: GradingServer, tmp_path: Path) -> None:
    server.fault = lambda model, prompt, number: Reply(400, "the prompt is too long")
    with pytest.raises(CareError, match="too long"):
        judged(server, tmp_path, ROWS, models="a")


def test_a_passage_that_a_judge_refuses_is_dropped_and_not_retried(server: GradingServer, tmp_path: Path) -> None:
    refusals = {"问1": Reply(400, "content_filter: blocked"), "问2": Reply(200, "I cannot help with that.")}
    server.fault = lambda model, prompt, number: next(
        (reply for query, reply in refusals.items() if f"问题：{query}" in prompt and model == "b"), None
    )
    rows = [{"query": f"问{n}", "pos": [f"答{n}是4"]} for n in range(4)]
    assert [row["query"] for row in judged(server, tmp_path, rows)] == ["问0", "问3"]
    assert report_of(tmp_path)["dropped"] == {"no passage has a grade of every judge": 2}
    asked = {prompt[-20:]: count for (model, prompt), count in server.asked.items() if model == "b"}
    assert sorted(asked.values()) == [1, 1, 1, 3]
    before = server.asked.copy()
    files_of(tmp_path).out.unlink()
    judged(server, tmp_path, rows)
    assert server.asked == before


def test_an_unreachable_server_ends_the_run_and_keeps_its_earlier_answers(
    server: GradingServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"query": f"问{n}", "pos": [f"答{n}是4"]} for n in range(30)]
    server.fault = lambda model, prompt, number: Reply(500) if len(server.graded) >= 20 else None
    with pytest.raises(CareError, match="answers 500"):
        judged(server, tmp_path, rows)
    assert not files_of(tmp_path).out.exists()
    # From here on no answer comes between two failures: after one, a model may be reported again.
    server.fault = lambda model, prompt, number: Reply(500)
    capsys.readouterr()
    with pytest.raises(CareError, match="answers 500"):
        judged(server, tmp_path, rows)
    told = [line for line in capsys.readouterr().err.splitlines() if "does not answer or is busy; asking again" in line]
    assert told
    assert len(told) == len(set(told)), "said once for each model"
    server.fault = lambda model, prompt, number: None
    assert len(judged(server, tmp_path, rows)) == 30
    assert set(server.graded.values()) == {1}


def test_a_truncated_last_answer_is_requested_again(server: GradingServer, tmp_path: Path) -> None:
    expected = judged(server, tmp_path, ROWS)
    answers = tmp_path / "answers.jsonl"
    answers.write_bytes(answers.read_bytes()[:-9])
    files_of(tmp_path).out.unlink()
    assert judged(server, tmp_path, ROWS) == expected
    assert sorted(server.asked.values())[-2:] == [1, 2]


@pytest.mark.parametrize(
    ("text", "grades"),
    [
        ('{"1": 3, "2": 0}', [3, 0]),
        ('```json\n{"2": 1, "1": "4"}\n```', [4, 1]),
        ("好的：{'1': 3, '2': 0,} 完毕", [3, 0]),
        ('{"Passage 1": 3, "passage-2": 0}', [3, 0]),
        ('{"1": 3, "2": 0', [3, 0]),
        ('思考 {"1": 0, "2": 0} 最后 {"1": 3, "2": 1}', [3, 1]),
        ('{"1": 3}', None),
        ('{"1": 3, "2": 5}', None),
        ('{"1": 3, "2": 0, "3": 1}', None),
        ('{"1": 3, "2": 2.5}', None),
        ('{"1": 3, "1": 2, "2": 0}', None),
        ('{"1": 3, "2": ' + "1" * 5000 + "}", None),
        ('{"1": 3, "2": 0}' + "1" * 1_000_000 + " " * 1_000_000, [3, 0]),
        ("{" + "1" * 1_000_000 + " " * 1_000_000, None),
        ("对不起，我不能评分", None),
        ("", None),
    ],
)
@pytest.mark.timeout(60)
def test_answers_are_repaired_or_refused(text: str, grades: list[int] | None) -> None:
    assert read_grades(text, 2) == grades


def test_kappa_equals_the_published_example() -> None:
    """The well-known example of Fleiss (1971): 10 subjects, 14 raters, 5 categories, kappa 0.210."""
    table = [
        (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
        (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
    ]  # fmt: skip
    votes = {tuple(grade for grade, times in enumerate(row) for _ in range(times)): 1 for row in table}
    assert fleiss_kappa(votes) == pytest.approx(0.210, abs=5e-4)
    assert fleiss_kappa({(1, 1): 3, (0, 0): 2}) == 1
    assert fleiss_kappa({(1, 1): 3}) is None
    assert fleiss_kappa({}) is None


def test_judges_are_named_by_model_and_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert Model.parse("m@http://x/v1") == Model("m", "http://x/v1")
    with pytest.raises(CareError, match="write MODEL@URL"):
        Model.parse("m")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://y/v1")
    assert Model.parse("m") == Model("m", "http://y/v1")
    with pytest.raises(CareError, match="no MISSING_KEY"):
        Model.parse("m@http://x/v1#MISSING_KEY")
    assert Model.parse("@cf/meta/llama@3@http://x/v1") == Model("@cf/meta/llama@3", "http://x/v1")
    for told in ("m@http://x/v1#sk-12-secret", "m@http://me:secret@x/v1"):
        with pytest.raises(CareError, match="write no key") as raised:
            Model.parse(told)
        assert "secret" not in str(raised.value)
    with pytest.raises(CareError, match="write MODEL@URL"):
        Model.parse("m@http://[bad/v1")
    with pytest.raises(CareError, match="named twice"):
        JudgeRows([Model("m", "http://x")] * 2, tmp_path)
    with pytest.raises(CareError, match="below --relevant"):
        JudgeRows([Model("m", "http://x")], tmp_path, relevant=2, irrelevant=2)


def test_the_api_key_is_never_written(server: GradingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers repeat the key in their errors, and errors of content filters are kept with the answers."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    server.fault = lambda model, prompt, number: Reply(403, "content_filter: sk-secret")
    assert judged(server, tmp_path, ROWS[:1]) == []
    assert "[key]" in (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    (tmp_path / "answers.jsonl").unlink()
    (tmp_path / "out.jsonl").unlink()
    for status in (400, 401, 500):
        server.fault = lambda model, prompt, number, status=status: Reply(status, "bad key sk-secret")  # type: ignore[misc]
        with pytest.raises(CareError, match=rf"answers {status}: .*bad key \[key\]"):
            judged(server, tmp_path, ROWS[:1])
    monkeypatch.setenv("OPENAI_API_KEY", "sk-“secret”")
    with pytest.raises(CareError, match="characters that no key has"):
        judged(server, tmp_path, ROWS[:1])
    assert all(b"sk-" not in path.read_bytes() for path in tmp_path.iterdir())


def test_lone_surrogates_are_not_sent_to_a_server(server: GradingServer, tmp_path: Path) -> None:
    server.fault = lambda model, prompt, number: Reply(200, "\ud83d") if number == 1 else None
    assert judged(server, tmp_path, [{"query": "高\ud83d", "pos": ["甲4"]}])[0]["query"] == "高?"


def test_an_invalid_answers_file_is_named(server: GradingServer, tmp_path: Path) -> None:
    judged(server, tmp_path, ROWS[:1])
    answers = (tmp_path / "answers.jsonl").read_text(encoding="utf-8")
    files_of(tmp_path).out.unlink()
    for content in ("\0\0\n", '{"text": "a row"}\n', "5\n", '{"key": "k"}\n', "[" * 100_000 + "\n"):
        (tmp_path / "answers.jsonl").write_text(answers + content, encoding="utf-8")
        with pytest.raises(CareError, match=r"answers\.jsonl:3: not an answer of a model; remove this line"):
            judged(server, tmp_path, ROWS[:1])


def test_a_change_of_any_prompt_file_restarts_the_run(
    server: GradingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = {step(server, tmp_path).parameters()["prompt"]}
    for changed in ("judge", "passage", "reminder-grades"):

        def edited(name: str, language: str, changed: str = changed) -> str:
            return load(name, language) + " " * (name == changed)

        for module in (judge, asking):
            monkeypatch.setattr(module, "load", edited)
        hashes.add(step(server, tmp_path).parameters()["prompt"])
    assert len(hashes) == 4


def test_the_rate_limit_counts_every_request_including_retries(server: GradingServer, tmp_path: Path) -> None:
    waited: list[float] = []

    class Recording(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return False

    server.fault = lambda model, prompt, number: Reply(500, "broken") if number == 1 else None
    asked = panel.Panel([Model("a", server.url)], tmp_path / "a.jsonl", Limits(at_once=1, per_minute=1))
    asked._stopped.wait = Recording().wait  # type: ignore[method-assign]
    requests = [panel.Request(prompt, str, "") for prompt in ("段落 1：4", "段落 1：3")]
    for request in requests:
        [future] = asked.submit(request)
        future.result()
    asked.close()
    # Four requests, a minute apart; the clock of the test does not move.
    assert [round(seconds, -1) for seconds in waited if seconds > 1] == [60, 120, 180]
