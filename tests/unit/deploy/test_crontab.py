"""The crontab's line, run by a shell as cron would, with a scripted `care`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from indexer.command import COLLECTION
from indexer.errors import Busy
from tests.unit.deploy.support import REPOSITORY, parse_care

LINES = [line for line in (REPOSITORY / "deploy/crontab").read_text().splitlines() if not line.startswith("#")]
(ENTRY,) = (line for line in LINES if not re.match(r"[A-Z_]+=", line))
FIELDS, COMMAND = ENTRY.split(maxsplit=5)[:5], ENTRY.split(maxsplit=5)[5]
HOME = "/srv/care"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Makes an installation whose `care` ends with the exit code in the file `end`."""
    (tmp_path / "var").mkdir()
    care = tmp_path / "care"
    care.write_text(f'#!/bin/sh\necho "care $*"\nexit "$(cat {tmp_path}/end)"\n')
    care.chmod(0o755)
    return tmp_path


def run_line(home: Path, end: int) -> subprocess.CompletedProcess[str]:
    (home / "end").write_text(str(end))
    environment = {"PATH": f"{home}:{os.environ['PATH']}"}
    line = COMMAND.replace(HOME, str(home))
    return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)


def test_the_job_runs_once_a_week() -> None:
    minute, hour, *rest = FIELDS
    assert (int(minute) < 60, int(hour) < 24, rest) == (True, True, ["*", "*", "0"])
    assert "%" not in COMMAND  # cron would cut the line there


def test_the_job_calls_a_valid_command() -> None:
    (words,) = re.findall(r"\bcare (index [^;]+);", COMMAND)
    given = parse_care(shlex.split(words))
    assert (given["action"], given["publish"], given["collection"]) == ("build", True, COLLECTION)


def test_a_success_is_silent_and_logged(home: Path) -> None:
    done = run_line(home, 0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    log = (home / "var/reindex.log").read_text()
    assert "care index build corpus.jsonl --publish --keep 4\n" in log
    assert log.endswith(" ended with 0\n")


@pytest.mark.parametrize("code", [1, Busy.exit_code])
def test_a_failure_prints_one_line_and_passes_its_exit_code_on(home: Path, code: int) -> None:
    done = run_line(home, code)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout == f"care: the re-index ended with {code}, see {home}/var/reindex.log\n"
    assert (home / "var/reindex.log").read_text().endswith(f" ended with {code}\n")


def test_a_new_installation_needs_only_its_own_folder(home: Path) -> None:
    (home / "var").rmdir()
    assert run_line(home, 0).returncode == 0
    assert (home / "var/reindex.log").is_file()


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    line = COMMAND.replace(HOME, str(tmp_path / "nowhere"))
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
