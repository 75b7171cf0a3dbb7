"""A step that is killed at random moments ends with the same bytes; `make kill-curate` kills each 20 times."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support.curate_kills import run_killed, timed

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
    killed = run_killed(
        [step, str(raw), "--out", str(out), "--sample", "9"], kills, seconds, pytestconfig.getoption("--seed")
    )
    print(f"\n{step}: {killed} of {kills} kills fell into {seconds:.2f} s of work")
    for ending in ENDINGS:
        assert Path(f"{out}{ending}").read_bytes() == Path(f"{whole}{ending}").read_bytes()
    assert not list(tmp_path.glob("*.part*"))
