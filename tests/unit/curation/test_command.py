"""Options of `care curate`: each makes its step, with the given values and defaults for the rest."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

import cli
from models.curation.command import add_arguments
from models.curation.dedup import Dedup
from models.curation.frame import Step
from models.curation.hyde import Hyde
from models.curation.judge import JudgeRows
from models.curation.match import Match
from models.curation.mine import Mine, Pool
from models.curation.panel import Limits, Model
from models.curation.search import Retrievers
from models.curation.split import Split
from models.curation.synthesize import Synthesize
from models.curation.vectors import TextEncoder
from models.errors import CareError

ROWS = [Path("r")]
ASKED = ([Model("m", "http://x")], Path("o.jsonl.answers.jsonl"))
FOUND = Retrievers([Path("c")], [], True, Path("o.jsonl.vectors"))
RANKED = Retrievers([Path("c")], [TextEncoder("e")], False, Path("o.jsonl.vectors"))
CASES = [
    ("split r --by sentence --from-pairs", Split(by="sentence", from_pairs=True)),
    ("dedup r --near 0", Dedup(near=0.0)),
    ("mine r --corpus c --bm25 --ranks 1 9", Mine(ROWS, FOUND, ranks=[1, 9])),  # type: ignore[arg-type]
    ("pool r --corpus c --bm25 --depth 3", Pool(FOUND, depth=3)),
    ("synthesize r --kind tasks --model m@http://x --language en", Synthesize(*ASKED, "tasks", ROWS, language="en")),
    ("hyde r --model m@http://x --corpus c --encoder e --blind", Hyde(*ASKED, RANKED, blind=True)),
    ("match r --model m@http://x --task select --selected 2", Match(*ASKED, "select", selected=2)),
    ("judge r --judge m@http://x --no-promote --at-once 2", JudgeRows(*ASKED, promote=False, limits=Limits(at_once=2))),
]  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), CASES, ids=[line.split()[0] for line, _ in CASES])
def test_options_become_the_parameters_of_their_step(line: str, expected: Step) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args([*line.split(), "--out", "o.jsonl"])
    assert repr(arguments.make(arguments)) == repr(expected)


@pytest.mark.parametrize(
    ("line", "out"),
    [
        ("curate pool q.jsonl --bm25 --corpus c.jsonl", "c.jsonl"),
        ("curate benchmark q.jsonl --corpus c.jsonl", "c.jsonl"),
        ("curate synthesize q.jsonl --kind synonym --model m@http://127.0.0.1:9 --dictionary c.jsonl", "c.jsonl"),
        ("curate benchmark q.jsonl --corpus c.jsonl --folder made", "made/rows.jsonl"),
        ("curate clean c.jsonl.part", "c.jsonl"),
        ("curate clean c.jsonl.report.json", "c.jsonl"),
        ("curate judge c.jsonl --judge m@http://127.0.0.1:9 --answers c.jsonl", "o.jsonl"),
        ("curate judge c.jsonl.answers.jsonl --judge m@http://127.0.0.1:9", "c.jsonl"),
        ("curate judge c.jsonl --judge m@http://127.0.0.1:9 --answers o.jsonl", "o.jsonl"),
    ],
)
def test_an_output_that_would_overwrite_an_input_or_another_file_is_refused(
    line: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("q.jsonl", "c.jsonl", "c.jsonl.part", "c.jsonl.report.json", "c.jsonl.answers.jsonl")
    for name in names:
        Path(name).write_text('{"text": "高血压", "origin": "a", "replace": "b"}', encoding="utf-8")
    assert cli.main([*line.split(), "--out", out]) == 1
    errors = capsys.readouterr().err
    assert "would be overwritten" in errors or "would take the place" in errors
    assert all(Path(name).read_text(encoding="utf-8").count("高血压") == 1 for name in names)


@pytest.mark.parametrize("out", ["", ".", "folder"])
def test_an_output_that_is_a_folder_is_refused_before_any_work(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("q.jsonl").write_text('{"text": "高血压"}\n', encoding="utf-8")
    assert cli.main(["curate", "judge", "q.jsonl", "--judge", "m@http://127.0.0.1:9", "--out", out]) == 1
    assert "a folder; give the name of a file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "q.jsonl"]


def test_an_unreadable_file_of_patterns_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q.jsonl").write_text('{"text": "高血压"}\n', encoding="utf-8")
    (tmp_path / "patterns").write_bytes(b"\xff\xfe")
    given = ["curate", "clean", str(tmp_path / "q.jsonl"), "--out", str(tmp_path / "o"), "--boilerplate"]
    assert cli.main([*given, str(tmp_path / "patterns")]) == 1
    assert "patterns:1: damaged" in capsys.readouterr().err


def test_hyde_without_an_encoder_is_refused_before_a_model_is_called() -> None:
    with pytest.raises(CareError, match="--encoder FOLDER, once"):
        Hyde(*ASKED, FOUND)


@pytest.mark.parametrize(
    "given",
    [
        ["mine", "a", "--out", "b", "--corpus", "c", "--bm25", "--seed", "-1"],
        ["mine", "a", "--out", "b", "--corpus", "c", "--bm25", "--margin", "nan"],
        ["synthesize", "a", "--out", "b", "--kind", "query", "--temperature", "nan"],
        ["hyde", "a", "--out", "b", "--corpus", "c", "--temperature", "-1"],
    ],
)
def test_numbers_out_of_range_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["curate", *given])
    assert f"argument {given[-2]}: '{given[-1]}' is" in capsys.readouterr().err
