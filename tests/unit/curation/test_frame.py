"""A step over files: its output, its report, and resuming a stopped run."""

from __future__ import annotations

import fcntl
import gzip
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from models import progress
from models.curation import frame
from models.curation.clean import Clean
from models.curation.frame import Files, Outcome, Step, run_step
from models.curation.rows import NOT_A_ROW, Row
from models.errors import BadData, CareError

Lines = list[dict[str, Any]]


@dataclass
class Odd(Step):
    """Keeps documents with an odd number, twice if it is divisible by three; stops before `stop`."""

    stop: int = -1
    applied: list[int] = field(default_factory=list)
    remembered: list[int] = field(default_factory=list)

    name = "odd"

    def parameters(self) -> dict[str, Any]:
        return {"modulus": 2}

    def apply(self, rows: Iterator[Row]) -> Iterator[Outcome]:
        for row in rows:
            if row["n"] == self.stop:
                raise KeyboardInterrupt
            self.applied.append(row["n"])
            times = 2 if row["n"] % 3 == 0 else 1
            notes = {"seen": 1}
            yield Outcome([row] * times, notes=notes) if row["n"] % 2 else Outcome(dropped="even", notes=notes)

    def resume(self, seen: int, made: Iterator[Row]) -> None:
        self.seen = seen
        self.remembered += [row["n"] for row in made]

    def facts(self, tally: frame.Tally) -> dict[str, Any]:
        return {"share": tally.rows_out / tally.rows_in}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    rows = [json.dumps({"text": f"文{n}", "n": n, "kept": {"as": "is"}}, ensure_ascii=False) for n in range(50)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join([*rows[:20], "no JSON", "{}"]).encode()))
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress("\n".join(rows[20:]).encode()))
    return Files([tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.xz"], tmp_path / "made" / "out.jsonl")


def lines(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_rows_keep_their_fields_and_record_their_origin(files: Files) -> None:
    run_step(Odd(), files)
    made = lines(files.out)
    assert [row["n"] for row in made[:4]] == [1, 3, 3, 5]
    stamp = {"step": "odd", "version": 1, "parameters": frame.digest({"modulus": 2})}
    assert made[0] == {"text": "文1", "n": 1, "kept": {"as": "is"}, "curated": [stamp]}
    again = Files([files.out], files.out.with_name("again.jsonl"))
    run_step(Odd(), again)
    assert lines(again.out)[0]["curated"] == [stamp, stamp]
    assert sorted(path.name for path in files.out.parent.iterdir()) == [
        "again.jsonl", "again.jsonl.report.json", "out.jsonl", "out.jsonl.report.json"
    ]  # fmt: skip


def test_an_input_field_named_curated_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "文", "n": 1, "curated": true}\n', encoding="utf-8")
    run_step(Odd(), Files([path], tmp_path / "out.jsonl"))
    assert lines(tmp_path / "out.jsonl")[0]["curated"][0] is True


def test_the_report_counts_reasons_and_shows_a_few_texts(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    tally = run_step(Odd(), files)
    report = json.loads(files.report.read_text(encoding="utf-8"))
    assert (report["rows_in"], report["rows_out"], tally.rows_out) == (52, 33, 33)
    assert report["dropped"] == {"even": 25, NOT_A_ROW: 2}
    assert report["samples"]["even"] == ["文0", "文2", "文4"]
    assert report["share"] == 33 / 52
    errors = capsys.readouterr().err
    assert "curate odd: 52 rows in, 33 out" in errors
    assert "  dropped         25  even" in errors


@pytest.mark.parametrize("stops", [[0], [1], [19, 20], [8, 9, 33, 49]])
def test_a_stopped_run_resumes_and_ends_with_the_same_bytes(
    files: Files, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "SAVE_EVERY_ROWS", 4)
    whole = Files(files.inputs, files.out.with_name("whole.jsonl"))
    run_step(Odd(), whole, sample=5)
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            run_step(Odd(stop=stop), files, sample=5)
        assert not files.out.exists()
    last = Odd()
    run_step(last, files, sample=5)
    for ending in ("", ".report.json", ".sample.jsonl"):
        assert files.beside(ending).read_bytes() == whole.beside(ending).read_bytes()
    first = last.applied[0]
    assert first >= stops[-1] - 6  # two lines of the first file are not rows, and at most four rows are read again
    assert last.remembered == [n for n in range(first) if n % 2 for _ in range(2 if n % 3 == 0 else 1)]


def test_a_run_killed_before_its_report_is_repeated(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "SAVE_EVERY_ROWS", 4)
    with pytest.raises(KeyboardInterrupt):
        run_step(Odd(stop=30), files)
    files.part.rename(files.out)  # as if killed right after the output got its name
    assert run_step(Odd(), files).rows_out == 33
    assert len(lines(files.out)) == 33


def test_a_complete_output_is_not_rebuilt(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_step(Odd(), files)
    second = Odd()
    assert run_step(second, files) == first
    assert second.applied == []
    assert "complete already" in capsys.readouterr().err


def test_other_parameters_restart_the_run(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "SAVE_EVERY_ROWS", 4)
    with pytest.raises(KeyboardInterrupt):
        run_step(Odd(stop=30), files)
    monkeypatch.setattr(Odd, "version", 2)
    step = Odd()
    assert run_step(step, files).rows_out == 33
    assert step.applied[0] == 0


def test_the_sample_is_spread_evenly_over_changed_rows(files: Files) -> None:
    run_step(Odd(), files, sample=10)
    shown = lines(files.beside(".sample.jsonl"))
    assert len(shown) == 10
    numbers = [each["before"]["n"] for each in shown]
    assert all(n % 2 == 0 or n % 3 == 0 for n in numbers)
    assert max(numbers) > 25


def test_unusable_inputs_and_outputs_are_refused(files: Files) -> None:
    with pytest.raises(BadData, match="no such file"):
        run_step(Odd(), Files([files.out], files.out))
    run_step(Odd(), files)
    with pytest.raises(CareError, match="would be overwritten"):
        run_step(Odd(), Files([files.out], files.out))
    with files.part.open("ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        with pytest.raises(CareError, match="another process"):
            run_step(Odd(), files)


def test_a_second_process_is_refused_until_the_first_has_put_everything_in_place(files: Files) -> None:
    """After OUT.part became OUT, a step may still write other files."""

    @dataclass
    class Slow(Odd):
        refused: bool = False

        def finish(self, out: Path) -> None:
            with pytest.raises(CareError, match="another process"):
                run_step(Odd(), files)
            self.refused = True

    step = Slow()
    run_step(step, files)
    assert step.refused
    assert len(lines(files.out)) == 33


def test_an_invalid_position_file_restarts_the_run(files: Files) -> None:
    files.out.parent.mkdir()
    files.position.write_text('{"rows_in": 3}')
    assert run_step(Odd(), files).rows_out == 33


def test_progress_without_a_terminal_has_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY_SECONDS", 0.0)
    (tmp_path / "in.jsonl").write_text('{"text": "甲"}\n' * 3, encoding="utf-8")
    run_step(Clean(), Files([tmp_path / "in.jsonl"], tmp_path / "out.jsonl"))
    assert "curate clean, 2 of 3 rows: " in capsys.readouterr().err
