"""A curation step killed at random moments ends with the same bytes; `make kill-curate` kills each 20 times."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.curate_kills import Run, forks, run_killed, timed
from tests.support.fast_encoder import BUNDLED
from tests.support.grading_server import USAGE, Reply, failing, grading_server

ENDINGS = ("", ".report.json", ".sample.jsonl")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with forks() as run:
        yield run


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """Writes rows; more of them if a step is killed more often."""
    chance = random.Random(0)
    parts = ["患者姓名：张三，", "住院号：123456。", "血压&gt;140。", "电话13812345678。", "头痛三天。", "咳嗽发热。"]
    texts = ["".join(chance.choices(parts, k=12)) for _ in range(1500 if pytestconfig.getoption("--kills") else 300)]
    path = tmp_path_factory.mktemp("raw") / "raw.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def few(raw: Path) -> Path:
    """Writes rows for the steps that search, with their titles as queries."""
    lines = raw.read_text(encoding="utf-8").splitlines()
    lines = lines[: len(lines) // 9]
    rows = [json.loads(line) | {"title": f"第{number}问：头痛"} for number, line in enumerate(lines)]
    path = raw.with_name("few.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def judged(raw: Path) -> Path:
    """Writes rows in the form of the judge's output."""
    texts = [json.loads(line)["text"] for line in raw.read_text(encoding="utf-8").splitlines()]
    rows = [
        {"query": f"问{n}", "pos": [text], "neg": [texts[n - 1]], "judged": {"pos": [[4]], "neg": [[0]]}}
        for n, text in enumerate(texts)
    ]
    path = raw.with_name("judged.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def search(corpus: Path) -> list[str]:
    return ["--corpus", str(corpus), "--encoder", str(BUNDLED), "--bm25"]


def same(out: Path, whole: Path, endings: Sequence[str]) -> bool:
    return all(Path(f"{out}{ending}").read_bytes() == Path(f"{whole}{ending}").read_bytes() for ending in endings)


@pytest.mark.parametrize(
    "step",
    ["clean", "split", "dedup", "exclude", "take", "anonymize", "convert", "diversify", "mine", "pool", "benchmark"],
)
def test_a_killed_step_ends_with_the_same_bytes(
    step: str, run: Run, raw: Path, few: Path, judged: Path, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    folder = tmp_path / "sets"
    options = {
        "clean": [str(raw), "--book"],
        "exclude": [str(raw), "--against", "examples", "--words", "6"],
        "take": [str(raw), "--share", "0", "0.5"],
        "convert": [str(raw), "--format", "beir-corpus"],
        "diversify": [str(few), "--encoder", str(BUNDLED), "--threshold", "0.9", "--seeds", "5", "--exact", "20"],
        "mine": [str(few), *search(few), "--count", "2"],
        "pool": [str(few), *search(few), "--depth", "3"],
        "benchmark": [str(judged), "--corpus", str(raw), "--folder", str(folder)],
    }
    given = [step, *options.get(step, [str(raw)]), "--sample", "9", "--out"]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    seconds = timed(run, [*given, str(whole)])
    sets = contents(folder)
    kills = pytestconfig.getoption("--kills") or 2
    started = run_killed(run, [*given, str(out)], kills, seconds, pytestconfig.getoption("--seed"))
    print(f"\n{step}: killed {kills} times in {started} runs of up to {seconds:.2f} s")
    assert same(out, whole, ENDINGS)
    assert contents(folder) == sets
    assert bool(sets) is (step == "benchmark")
    assert not [*tmp_path.glob("*.part*"), *tmp_path.glob("*.state")]


PAIRS = [{"query": f"问{n}", "pos": [f"答{n}是4"], "neg": [f"乙{n}是0", f"丙{n}是3"]} for n in range(120)]


ASKING = [("judge", "ab", 2), ("synthesize", "a", 1), ("hyde", "a", 2), ("match", "a", 1)]


@pytest.mark.parametrize(("step", "models", "requests"), ASKING)
def test_a_killed_step_repeats_only_lost_requests_to_language_models(
    step: str, models: str, requests: int, run: Run, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    rows = PAIRS[:40] if step == "hyde" else PAIRS
    raw, whole, out = (tmp_path / f"{name}.jsonl" for name in ("raw", "whole", "out"))
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kills, at_once = pytestconfig.getoption("--kills") or 2, 4
    with grading_server() as server:
        if step != "judge":
            server.respond = lambda model, prompt, number: f"写{prompt[-20:]}".replace("\n", "")
        if step == "match":
            server.respond = lambda model, prompt, number: json.dumps({"evidence": [prompt[-2:]]})
        named = [
            word for model in models for word in ("--judge" if step == "judge" else "--model", f"{model}@{server.url}")
        ]
        more = {"synthesize": ["--kind", "query"], "hyde": [*search(raw)[:-1], "--documents", "2"]}
        more["match"] = ["--task", "extract"]
        pace = ["--at-once", str(at_once), "--per-minute", "12000"]
        arguments = [step, str(raw), *named, *more.get(step, []), *pace, "--out"]
        seconds = timed(run, [*arguments, str(whole)])
        before = server.graded.total()
        started = run_killed(run, [*arguments, str(out)], kills, seconds, pytestconfig.getoption("--seed"))
        asked = server.graded.total() - before
    lost = asked - before
    print(f"\n{step}: killed {kills} times in {started} runs; {lost} of {asked} answers were lost")
    assert same(out, whole, ("", ".report.json"))
    assert before == requests * len(rows)
    assert 0 <= lost <= at_once * kills  # requests in flight when it was killed


def test_kills_and_a_failing_server_together_lose_no_row_and_count_every_answer(
    run: Run, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """429 with and without Retry-After, 5xx, timeouts, cut and slow bodies, broken JSON and refusals, and kills."""
    raw, whole, out = (tmp_path / f"{name}.jsonl" for name in ("raw", "whole", "out"))
    raw.write_text("".join(json.dumps(row) + "\n" for row in PAIRS[:16]), encoding="utf-8")
    kills, at_once = pytestconfig.getoption("--kills") or 2, 8
    with grading_server() as server:
        refused = Reply(400, "content_filter: blocked")
        server.fault = lambda model, prompt, number: (
            refused if model == "b" and "问题：问7\n" in prompt else failing(model, prompt, number)
        )
        named = [word for model in "ab" for word in ("--judge", f"{model}@{server.url}")]
        arguments = ["judge", str(raw), *named, "--at-once", str(at_once), "--timeout-seconds", "2", "--out"]
        seconds = timed(run, [*arguments, str(whole)])
        assert set(server.graded.values()) == {1}
        server.asked.clear(), server.graded.clear()
        server.paid = 0
        run_killed(run, [*arguments, str(out)], kills, seconds, pytestconfig.getoption("--seed"))
    assert same(out, whole, [""])
    assert len(out.read_text(encoding="utf-8").splitlines()) == 15, "all but the refused one"
    again = server.graded.total() - len(server.graded)
    assert len(server.graded) == 2 * 16 - 1
    report = json.loads(Path(f"{out}.report.json").read_text(encoding="utf-8"))
    counted = sum(report["notes"][f"prompt tokens of {model}"] for model in "ab") // USAGE["prompt_tokens"]
    kept = [json.loads(line) for line in Path(f"{out}.answers.jsonl").read_text(encoding="utf-8").splitlines()]
    print(f"\njudge, failing server: killed {kills} times; {server.paid} answers, {again} of them again")
    assert len({record["key"] for record in kept}) == len(kept)
    assert counted == sum(not record["refused"] for record in kept)
    assert 0 <= server.paid - counted <= at_once * kills  # requests in flight when it was killed
    assert again <= at_once * kills
