"""Audit of a retrieval set by a panel over HTTP: wrong labels are counted by query."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli import main
from tests.support.curation import write_lines
from tests.support.grading_server import grading_server

DOCUMENTS = {
    "right": "感冒 多喝水4",
    "missed": "感冒 多休息4",
    "wrong": "感冒 吃辣椒0",
    "disputed": "感冒 喝姜汤3",
    "other": "骨折 打石膏0",
}


def test_wrong_labels_of_a_set_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    # A title is part of a document: otherwise a labelled document would be found again without it.
    corpus = [{"_id": id, "title": "题", "text": text} for id, text in DOCUMENTS.items()]
    write_lines(tmp_path / "corpus.jsonl", corpus)
    write_lines(folder / "queries.jsonl", [{"_id": "q", "text": "感冒"}])
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\tright\t1\nq\twrong\t1\n", encoding="utf-8")
    out = tmp_path / "audit.jsonl"
    with grading_server() as server:
        judges = [option for model in "ab" for option in ("--judge", f"{model}@{server.url}")]
        given = ["curate", "audit", str(folder), "--out", str(out), "--bm25", "--depth", "4", *judges]
        assert main(given) == 0
        paid = server.paid
        out.unlink()
        assert main(given) == 0
        assert server.paid == paid == 2  # no request is repeated
    labels = json.loads(Path(f"{out}.report.json").read_text(encoding="utf-8"))["labels"]
    counts = {"queries": 1, "positives": 2, "judged_positives": 2, "false_positives": 1, "false_negatives": 1}
    assert {name: labels[name] for name in counts} == counts
    shown = capsys.readouterr().err
    assert "labels: {" not in shown
    assert shown.count("1  false negatives a query") == shown.count("-0.5  their kappa") == 2  # once in each run
    [row] = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert row["disputed"] == ["题\n感冒 喝姜汤3"]


def test_a_folder_without_a_corpus_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set").mkdir()
    given = ["curate", "audit", str(tmp_path / "set"), "--out", str(tmp_path / "o"), "--bm25", "--judge", "m@http://x"]
    assert main(given) == 1
    assert "no corpus.jsonl" in capsys.readouterr().err
