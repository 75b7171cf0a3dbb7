"""Progress of long work, printed in lines if there is no terminal for a bar."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from indexer.build import build
from indexer.store.collection import Collection
from models import progress
from models.progress import Progress
from tests.support.fast_encoder import FastEncoder
from tests.unit.indexer.support import write_lines


def test_a_line_has_the_rate_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY_SECONDS", 0.0)
    with Progress("encode", "passages", 5000) as bar:
        bar.update(1250)
    assert re.fullmatch(r"encode, 1,250 of 5,000 passages: [\d,.]+ passages/s, [\d:]+ left\n", capsys.readouterr().err)


def test_a_slow_rate_is_shown_by_the_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 90.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    bar = Progress("judge", "rows", 10, first=2)
    bar.done = 5
    assert bar.line() == "judge, 5 of 10 rows: 2.0 rows/min, 02:30 left"


def test_a_line_is_printed_while_a_library_is_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY_SECONDS", 0.01)
    printed = threading.Event()
    line = Progress.line
    monkeypatch.setattr(Progress, "line", lambda self: (printed.set(), line(self))[1])
    with Progress("index"):
        assert printed.wait(60)  # nothing is counted meanwhile
    assert re.match(r"index, \d\d:\d\d so far\n", capsys.readouterr().err)


def test_only_the_innermost_of_nested_work_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY_SECONDS", 0.0)
    with Progress("outer", "parts", 2) as outer, Progress("inner", "parts", 2) as inner:
        outer.update()
        inner.update()
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == ["inner"]


def test_a_build_without_a_terminal_prints_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY_SECONDS", 0.0)
    corpus = write_lines(tmp_path / "corpus.jsonl", *({"_id": str(n), "text": f"text {n}"} for n in range(3)))
    build([corpus], FastEncoder(), Collection(tmp_path / "collection"))
    errors = capsys.readouterr().err
    assert re.search(r"^read, 3 documents: [\d,.]+ documents/s$", errors, re.MULTILINE)
    assert re.search(r"^encode, 3 of 3 passages: [\d,.]+ passages/s, 00:00 left$", errors, re.MULTILINE)
