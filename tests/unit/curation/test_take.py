"""Shares of rows: even over the sources, the same in every run, and no query in two shares."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from models.curation.frame import Files, run_step
from models.curation.take import Take
from models.errors import CareError
from tests.support.curation import read_out, run_in, write_lines

ROWS = [
    {"text": f"{book}的第{n}句", "source": book}
    for book in ("大书", "小书")
    for n in range(900 if book == "大书" else 10)
]


def taken(folder: Path, rows: list[dict[str, object]], first: float, last: float, seed: int = 0) -> list[object]:
    folder.mkdir()
    step = Take([folder / "rows.jsonl"], (first, last), seed)
    return [row.get("text") or row["query"] for row in run_in(folder, step, rows)]


def test_every_source_gives_its_share_and_the_shares_add_up(tmp_path: Path) -> None:
    train, held = taken(tmp_path / "a", [*ROWS], 0, 0.9), taken(tmp_path / "b", [*ROWS], 0.9, 1)
    assert Counter(str(text)[:2] for text in train) == {"大书": 810, "小书": 9}
    assert sorted(map(str, [*train, *held])) == sorted(str(row["text"]) for row in ROWS)
    assert taken(tmp_path / "c", [*reversed(ROWS)], 0.9, 1) == [*reversed(held)], "independent of the order of the file"
    assert set(taken(tmp_path / "d", [*ROWS], 0.9, 1, seed=1)) != set(held)
    assert [text for text in held if str(text).startswith("大书")] != [row["text"] for row in ROWS[810:900]]


def test_rows_of_one_query_stay_together(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"query": f"问{n % 20}", "pos": [f"答{n}"]} for n in range(60)]
    train, held = taken(tmp_path / "a", rows, 0, 0.7), taken(tmp_path / "b", rows, 0.7, 1)
    assert (len(train), len(held)) == (42, 18)
    assert not set(train) & set(held)


def test_rows_without_a_source_are_of_their_file(tmp_path: Path) -> None:
    files = [
        write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{name}{n}"} for n in range(10)]) for name in ("a", "b")
    ]
    run_step(Take(files, (0, 0.5)), Files(files, tmp_path / "out.jsonl"))
    assert Counter(row["source"] for row in read_out(tmp_path)) == {"a": 5, "b": 5}


def test_a_query_of_two_sources_is_in_one_share(tmp_path: Path) -> None:
    sources = {"a": range(40), "b": range(20, 100), "c": range(0, 100, 7)}
    rows: list[dict[str, object]] = [
        {"query": f"问{n}", "pos": ["答"], "source": source} for source, own in sources.items() for n in own
    ]
    train, held = taken(tmp_path / "a", rows, 0, 0.7), taken(tmp_path / "b", rows, 0.7, 1)
    assert len(set(train)) == 70
    assert not set(train) & set(held)
    assert len(train) + len(held) == len(rows)


@pytest.mark.parametrize("share", [(0.5, 0.5), (-0.1, 1.0), (0.0, 1.1), (float("nan"), 1.0)])
def test_a_share_must_be_between_0_and_1(share: tuple[float, float]) -> None:
    with pytest.raises(CareError, match="--share: write FROM TO"):
        Take([], share)
