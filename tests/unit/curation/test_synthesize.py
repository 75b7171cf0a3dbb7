"""Rows written by a language model over HTTP: every kind, refused answers, and a failing server."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models.endpoint
from models.curation.frame import digest
from models.curation.hyde import Hyde
from models.curation.match import TASKS
from models.curation.panel import Limits, Model
from models.curation.search import Retrievers
from models.curation.synthesize import KINDS, Synthesize, read_fields, read_line, read_list
from models.curation.vectors import Vectors
from models.encoder.spec import Side
from models.errors import BadData, CareError
from models.prompts import LANGUAGES, fill, load
from tests.support.curation import CircleEncoder, report_in, run_in, write_lines
from tests.support.grading_server import GradingServer, Reply, grading_server

PROMPTS = Path("models/prompts")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradingServer]:
    monkeypatch.setattr(models.endpoint, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(models.endpoint, "LONGEST_PAUSE_SECONDS", 0.05)
    with grading_server() as server:
        yield server


def synthesized(
    server: GradingServer,
    folder: Path,
    kind: str,
    rows: list[dict[str, Any]],
    **more: Any,  # noqa: ANN401
) -> list[dict[str, Any]]:
    step = Synthesize(
        [Model("m", server.url)], folder / "answers.jsonl", kind, [write_lines(folder / "rows.jsonl", rows)],
        limits=Limits(at_once=3), **more,
    )  # fmt: skip
    return run_in(folder, step, rows)


def test_a_question_is_written_for_a_passage(server: GradingServer, tmp_path: Path) -> None:
    server.respond = lambda model, prompt, number: "问题：“二甲双胍怎么吃？”" if "双胍" in prompt else "好的：\n一\n二"
    rows = [{"text": "二甲双胍随餐服用", "title": "药", "source": "s"}, {"text": "别的"}]
    rows.append({"text": "有人问二甲双胍怎么吃，答：随餐"})
    made = synthesized(server, tmp_path, "query", rows, instruction="找答案")
    assert made == [{"query": "二甲双胍怎么吃？", "pos": ["二甲双胍随餐服用"], "source": "s", "instruction": "找答案"}]
    assert report_in(tmp_path)["dropped"] == {"no usable answer": 1, "copied from the prompt": 1}
    assert sorted(server.asked.values()) == [1, 1, 3]
    (stamp,) = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["curated"]
    assert stamp["models"] == ["m"]
    assert stamp["prompt"]


def test_a_repeated_reminder_is_no_question(server: GradingServer, tmp_path: Path) -> None:
    reminder = (PROMPTS / "reminder.zh.txt").read_text(encoding="utf-8").strip()
    server.respond = lambda model, prompt, number: reminder
    assert synthesized(server, tmp_path, "query", [{"text": "二甲双胍随餐服用"}]) == []
    assert report_in(tmp_path)["dropped"] == {"copied from the prompt": 1}


def test_tasks_become_triples_with_the_task_as_instruction(server: GradingServer, tmp_path: Path) -> None:
    server.respond = lambda model, prompt, number: '```json\n["找药物说明", "找病因", "找病因"]\n```'
    tasks = synthesized(server, tmp_path, "tasks", [{"text": "糖尿病"}], count=3)
    assert tasks == [{"text": "找药物说明"}, {"text": "找病因"}]
    (tmp_path / "out.jsonl").unlink()
    whole = {"query": "谁？", "positive": "甲乙丙", "negative": "丁戊己"}
    server.respond = lambda model, prompt, number: json.dumps(
        whole if "病因" in prompt else whole | {"negative": "甲乙丙"}
    )
    triples = synthesized(server, tmp_path, "triple", tasks)
    assert triples == [{"query": "谁？", "pos": ["甲乙丙"], "neg": ["丁戊己"], "instruction": "找病因"}]
    assert report_in(tmp_path)["dropped"] == {"two equal texts": 1}
    (asked,) = [prompt for _, prompt in server.asked if "检索任务：找病因" in prompt]
    assert all(any(choice in asked for choice in values) for values in tomllib.loads(load("shapes", "zh")).values())


def test_a_paraphrase_gets_a_distant_sentence_as_negative(server: GradingServer, tmp_path: Path) -> None:
    server.respond = lambda model, prompt, number: "改写" + prompt.rpartition("：")[2]
    rows = [{"text": f"第{n}句"} for n in range(40)]
    made = synthesized(server, tmp_path, "paraphrase", [*rows, {"query": "问", "pos": ["答"]}])
    assert len(made) == 40
    for row in made:
        place, other = (
            int(re.findall(r"\d+", text)[0]) if "第" in text else 40 for text in (row["query"], row["neg"][0])
        )
        assert min(abs(place - other), 41 - abs(place - other)) >= 10
        assert row["pos"] == [f"改写{row['query']}"]


def test_a_sentence_is_not_its_own_negative(server: GradingServer, tmp_path: Path) -> None:
    server.respond = lambda model, prompt, number: "改写"
    assert synthesized(server, tmp_path, "paraphrase", [{"text": "总是同一句"}] * 8) == []
    assert report_in(tmp_path)["dropped"] == {"a distant sentence equal to it: dedup drops such": 8}


def test_synonyms_are_checked(server: GradingServer, tmp_path: Path) -> None:
    dictionary = write_lines(
        tmp_path / "terms.jsonl", [{"origin": "感冒", "replace": "上呼吸道感染"}, {"origin": "冒", "replace": "x"}]
    )
    good = {"positive": "上呼吸道感染要吃什么药好", "hard": "上呼吸道感染会传染吗", "easy": "感冒会传染吗"}
    answers = {"甲": good, "乙": good | {"easy": "会传染吗"}, "丙": good | {"positive": "上呼吸道感染" * 9}}
    server.respond = lambda model, prompt, number: json.dumps(
        next(answers[name] for name in answers if name in prompt.rpartition("：")[2])
    )
    rows = [{"text": f"{name}感冒一般要吃什么药"} for name in answers] + [{"text": "头痛"}]
    made = synthesized(server, tmp_path, "synonym", rows, dictionary=dictionary)
    assert made == [{"query": "甲感冒一般要吃什么药", "pos": [good["positive"]], "neg": [good["hard"], good["easy"]]}]
    reasons = {"the term is missing in the easy negative", "a positive of another length", "no term of the dictionary"}
    assert set(report_in(tmp_path)["dropped"]) == reasons
    with pytest.raises(BadData, match="--dictionary"):
        Synthesize([], tmp_path, "synonym", [])
    for line in (
        "no JSON",
        '{"origin": "感冒"}',
        '{"origin": "感冒", "replace": 3}',
        '{"origin": "", "replace": "x"}',
    ):
        dictionary.write_text(f'{{"origin": "a", "replace": "b"}}\n{line}\n', encoding="utf-8")
        with pytest.raises(BadData, match=r"terms\.jsonl:2: not a line of a dictionary"):
            synthesized(server, tmp_path, "synonym", rows, dictionary=dictionary)


def test_a_failing_server_loses_no_row_and_no_answered_request_is_repeated(
    server: GradingServer, tmp_path: Path
) -> None:
    server.respond = lambda model, prompt, number: "问" + prompt[-3:]
    failures = [Reply(500), Reply(429, "", {"Retry-After": "0"}), Reply(200, "")]
    server.fault = lambda model, prompt, number: failures[number - 1] if number <= sum(map(ord, prompt)) % 4 else None
    rows = [{"text": f"第{n:03}"} for n in range(20)]
    made = synthesized(server, tmp_path, "query", rows)
    assert [row["pos"] for row in made] == [[row["text"]] for row in rows]
    assert set(server.graded.values()) == {1}
    before = server.asked.copy()
    (tmp_path / "out.jsonl").unlink()
    assert synthesized(server, tmp_path, "query", rows) == made
    assert server.asked == before


ANGLES = {"源": 0.0, "旁": 0.5, "好": 0.1, "坏": 0.6, "问": 0.4}


@pytest.mark.parametrize("blind", [False, True])
def test_the_draft_that_ranks_its_source_best_is_kept(server: GradingServer, tmp_path: Path, blind: bool) -> None:
    server.respond = lambda model, prompt, number: "好稿" if server.seeds[-1] == 1 else "坏稿"
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": "源文"}, {"text": "旁文"}])
    found = Retrievers([corpus], [CircleEncoder(angles=ANGLES)], False, tmp_path / "vectors")
    step = Hyde(
        [Model("m", server.url)], tmp_path / "a.jsonl", found, documents=3, blind=blind, limits=Limits(at_once=1)
    )
    rows = [{"query": "问", "pos": ["源文"]}, {"query": "问", "pos": ["不在"]}, {"text": "文"}]
    assert run_in(tmp_path, step, rows) == [{"query": "问", "pos": ["源文"], "hypothetical": ["好稿"], "rank": 1}]
    report = report_in(tmp_path)
    assert report["dropped"] == {
        "the first positive is not in the corpus": 1,
        "a document, no question: synthesize --kind query asks one": 1,
    }
    assert report["found_first"] == {"query ranks its source first": 0, "kept draft ranks its source first": 1}
    assert any("源文" in prompt for _, prompt in server.asked) is not blind
    assert server.paid == 3  # no request for dropped rows


@dataclass(frozen=True)
class CountingEncoder(CircleEncoder):
    """Gives vectors of two small integers, whose products are exact in any order of summation."""

    reads: list[int] = field(default_factory=list)

    def read(self, texts: Sequence[str], side: Side) -> Vectors:
        self.reads.append(len(texts))
        return np.array([[int(digest(text), 16) % n - n // 2 for n in (61, 67)] for text in texts], np.float32)


def test_drafts_are_encoded_in_blocks_and_ranked_as_one_by_one(server: GradingServer, tmp_path: Path) -> None:
    server.respond = lambda model, prompt, number: f"稿{prompt[-4:]}{number}"
    texts, encoder = [f"文{n:03}" for n in range(50)], CountingEncoder()
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
    found = Retrievers([corpus], [encoder], False, tmp_path / "vectors")
    step = Hyde([Model("m", server.url)], tmp_path / "a.jsonl", found, documents=3, limits=Limits(at_once=1))
    rows = [{"query": f"问{n}", "pos": [text]} for n, text in enumerate(texts)]
    made = run_in(tmp_path, step, [*rows[:20], {"text": "文"}, {"query": "问", "pos": ["不在"]}, *rows[20:]])
    known = encoder.read(texts, Side.DOCUMENT)
    for n, row in enumerate(made):
        scores = [known @ vector for vector in encoder.read([f"稿{texts[n]}{k}" for k in (1, 2, 3)], Side.DOCUMENT)]
        ranks = [1 + int((of_draft > of_draft[n]).sum()) for of_draft in scores]
        assert row["rank"] == min(ranks)
        assert row["hypothetical"] == [f"稿{texts[n]}{1 + ranks.index(min(ranks))}"]
    assert [row["query"] for row in made] == [row["query"] for row in rows]
    assert encoder.reads[:5] == [50, 30, 90, 20, 60], "the corpus, then queries and drafts of two blocks"


@pytest.mark.parametrize(
    ("text", "line"),
    [("问题：高血压？", "高血压？"), ('"What?"', "What?"), ("一\n二", None), ("", None), (" “” ", None)],
)
def test_an_answer_must_be_one_line(text: str, line: str | None) -> None:
    assert read_line(text) == line


def test_json_is_found_within_other_text() -> None:
    assert read_fields('好：```{"a": " 1 ", "b": "2"}``` {}', names=("a", "b")) == {"a": "1", "b": "2"}
    for text in ('{"a": "1"}', '{"a": "1", "b": ""}', '{"a": 1, "b": "2"}', '{"a": "1", "b"', ""):
        assert read_fields(text, names=("a", "b")) is None
    assert read_list('x ["a", "b", "a"]') == ["a", "b"]
    assert read_list('["a", 1]') is None
    assert read_list("[]") is None
    assert read_list("[" * 100_000) is None


def test_a_model_given_twice_is_refused(tmp_path: Path) -> None:
    both = [Model("m", "http://a"), Model("m", "http://b")]
    with pytest.raises(CareError, match="named twice"):
        Synthesize(both, tmp_path / "answers.jsonl", "query", [])


def test_every_prompt_exists_in_both_languages_with_the_same_fields() -> None:
    names = {path.name.split(".")[0] for path in PROMPTS.glob("*.txt")}
    without_fields = {"reminder", "reminder-grades", "shapes"}
    assert names == {*KINDS, *TASKS, "judge", "hyde", "blind", "personal", "passage", *without_fields}
    for name in names:
        fields = [set(re.findall(r"\{(\w+)\}", load(name, language))) for language in LANGUAGES]
        assert fields[0] == fields[1]
        assert bool(fields[0]) is (name not in without_fields)
    zh, en = (tomllib.loads(load("shapes", language)) for language in LANGUAGES)
    assert {name: len(values) for name, values in zh.items()} == {name: len(values) for name, values in en.items()}


def test_braces_in_a_value_are_not_expanded() -> None:
    assert fill("{a} {b} {c}", a="{b}", b="x") == "{b} x {c}"
