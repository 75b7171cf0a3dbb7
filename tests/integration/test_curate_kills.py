"""A step that is killed at random moments ends with the same bytes; `make kill-curate` kills each 20 times."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.curate_kills import run_killed, timed
from tests.support.grading_server import grading_server

ENDINGS = ("", ".report.json", ".sample.jsonl")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance = random.Random(0)
    parts = ["患者姓名：张三，", "住院号：123456。", "血压&gt;140。", "电话13812345678。", "头痛三天。", "咳嗽发热。"]
    texts = ["".join(chance.choices(parts, k=12)) for _ in range(1500)]
    path = tmp_path_factory.mktemp("raw") / "raw.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.parametrize("step", ["clean", "split", "dedup", "anonymize"])
def test_a_killed_step_ends_with_the_same_bytes(
    step: str, raw: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    seconds = timed([step, str(raw), "--out", str(whole), "--sample", "9"])
    kills = pytestconfig.getoption("--kills") or 2
    given = [step, str(raw), "--out", str(out), "--sample", "9"]
    started = run_killed(given, kills, seconds, pytestconfig.getoption("--seed"))
    print(f"\n{step}: killed {kills} times in {started} runs of up to {seconds:.2f} s")
    for ending in ENDINGS:
        assert Path(f"{out}{ending}").read_bytes() == Path(f"{whole}{ending}").read_bytes()
    assert not list(tmp_path.glob("*.part*"))


def test_a_killed_judge_ends_with_the_same_bytes_and_asks_only_what_was_lost(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    rows = [{"query": f"问{n}", "pos": [f"答{n}是4"], "neg": [f"乙{n}是0", f"丙{n}是3"]} for n in range(150)]
    raw, whole, out = (tmp_path / f"{name}.jsonl" for name in ("raw", "whole", "out"))
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kills, at_once = pytestconfig.getoption("--kills") or 2, 4
    with grading_server() as server:
        judges = [word for model in "ab" for word in ("--judge", f"{model}@{server.url}")]
        arguments = ["judge", str(raw), *judges, "--at-once", str(at_once), "--per-minute", "12000", "--out"]
        seconds = timed([*arguments, str(whole)])
        server.graded.clear()
        started = run_killed([*arguments, str(out)], kills, seconds, pytestconfig.getoption("--seed"))
        twice = server.graded.total() - len(server.graded)
    print(f"\njudge: killed {kills} times in {started} runs; {twice} of {server.graded.total()} answers were lost")
    for ending in ("", ".report.json"):
        assert Path(f"{out}{ending}").read_bytes() == Path(f"{whole}{ending}").read_bytes()
    assert len(server.graded) == 2 * len(rows)
    assert twice <= at_once * kills  # those that were on their way
