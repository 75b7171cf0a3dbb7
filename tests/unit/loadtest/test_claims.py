"""The claims that `make claims` runs against those in the documents."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest

from loadtest.lab import claims
from loadtest.lab.claims import RELIABILITY, TEST_FILE, Claim, read_claims, reliability_tests, run

PROGRAM = re.compile(r"`(?:make ([\w-]+)|python -m ([\w.]+))")


def claim(command: str = "true", **facts: object) -> Claim:
    return Claim("a claim", "docs/x.md", "published", command, **facts)  # type: ignore[arg-type]


def test_every_published_text_is_in_its_document() -> None:
    missing = [one for one in read_claims() if one.published not in Path(one.document).read_text(encoding="utf-8")]
    assert missing == []


def test_every_row_of_reliability_is_run() -> None:
    makefile = Path("Makefile").read_text(encoding="utf-8")
    commands = " ".join(one.command for one in read_claims())
    rows = [row for row in RELIABILITY.read_text(encoding="utf-8").split("\n\n")[2].splitlines()[2:] if row]
    assert len(rows) > 20
    for row in rows:
        target = PROGRAM.search(row)
        module = target and (target[2] or re.findall(rf"^{target[1]}:.*\n(?:.*\n)*?.*-m ([\w.]+)", makefile, re.M)[0])
        assert TEST_FILE.search(row) or (module and module in commands), row


def test_every_test_that_reliability_names_exists_and_is_run_once() -> None:
    words = " ".join(dict.fromkeys(one.command for one in read_claims())).split()
    for path in reliability_tests():
        assert path.is_file()
        assert words.count(str(path.relative_to(claims.REPOSITORY))) == 1, path


@pytest.mark.parametrize(
    ("limits", "output", "holds"),
    [
        ({"at_most": 3.0}, "x 2 x 3", True),
        ({"at_most": 3.0}, "x 2 x 3.1", False),
        ({"at_least": 3.0}, "x 3 x 4", True),
        ({"at_least": 3.0}, "x 2.9 x 4", False),
        ({"at_most": 1000.0}, "x 1,001", False),
        ({"at_most": 3.0}, "nothing", False),
    ],
)
def test_the_worst_figure_counts(limits: dict[str, float], output: str, holds: bool) -> None:
    assert claim(figure=r"x ([\d.,]+)", **limits).judge(output, 0)[1] is holds
    assert claim(figure=r"x ([\d.,]+)", **limits).judge(output, 1)[1] is False


def test_a_claim_for_another_machine_is_listed_and_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [claim("false", machine="x86_64"), claim("true", machine="aarch64")]
    monkeypatch.setattr(claims, "read_claims", lambda: made)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert claims.main([]) == 0
    assert capsys.readouterr().out.count("| a claim |") == 1
    assert claims.main(["--list"]) == 0
    assert capsys.readouterr().out == "a claim: false (on x86_64)\na claim: true\n"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert claims.main([]) == 1


def test_a_command_runs_once_and_a_failed_claim_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    command = f"{sys.executable} -c \"open({str(counted)!r}, 'a').write('x'); print('x 5')\""
    two = [claim(command, figure=r"x (\d)", at_most=5.0), claim(command, figure=r"x (\d)", at_most=4.0)]
    assert run(two) is False
    assert counted.read_text() == "x"
    shown = capsys.readouterr().out
    assert "| published | 5 (at most 5) | yes |" in shown
    assert "| published | 5 (at most 4) | NO |" in shown
    assert run([claim("false")]) is False
    assert run([claim("true")]) is True
