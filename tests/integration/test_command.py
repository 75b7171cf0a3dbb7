"""The `care` command as a person uses it: whole stages, and one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli import COMMANDS, main


def care(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "cli.py", *map(str, arguments)], capture_output=True, text=True)


def a_corpus(folder: Path, rows: int) -> Path:
    lines = [json.dumps({"_id": f"d{row}", "text": f"第{row}种药的用法"}) for row in range(rows)]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "corpus.jsonl"


def test_help_names_every_command() -> None:
    overview = care("--help")
    assert overview.returncode == 0
    assert all(name in overview.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: care {name}" in capsys.readouterr().out


def test_build_publish_list_rollback_verify(tmp_path: Path) -> None:
    collection = ["--collection", tmp_path / "collection"]
    first = care("index", "build", a_corpus(tmp_path, 3), "--publish", *collection)
    assert first.returncode == 0, first.stderr
    assert "3 documents" in first.stdout
    assert care("index", "build", a_corpus(tmp_path, 4), *collection).returncode == 0
    assert care("index", "publish", *collection).returncode == 0
    listed = care("index", "list", *collection).stdout.splitlines()
    assert [line[0] for line in listed] == [" ", "*"]
    assert "rolled back" in care("index", "rollback", *collection).stdout
    assert [line[0] for line in care("index", "list", *collection).stdout.splitlines()] == ["*", " "]
    assert "is sound" in care("index", "verify", *collection).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("index", "build", "no-such-file.jsonl"),
        ("index", "build", "README.md", "--field", "nonsense"),
        ("index", "publish", "--collection", "no-such-folder"),
        ("index", "build", "examples/corpus.jsonl", "--encoder", "docs"),
        ("eval", "docs"),
        ("eval", "examples", "--weight", "7"),
        ("eval", "examples", "--json", "no-such-folder/figures.json"),
        ("train", "no-such.toml", "--out", "x"),
        ("export", "docs", "x"),
    ],
)
def test_a_failure_is_one_line_that_names_the_command(arguments: tuple[str, ...]) -> None:
    failed = care(*arguments)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"care {arguments[0]}: ")


def test_an_export_of_nothing_is_refused_before_torch_is_imported() -> None:
    code = "import cli, sys; print(cli.main(['export', 'docs', 'x']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARE_QUEUE_LIMIT", "many")
    failed = care("serve")
    assert failed.returncode == 1
    assert "CARE_QUEUE_LIMIT" in failed.stderr
