"""Public sets in their published formats become rows; judged rows become a benchmark for `care eval`."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.curation.benchmark import Benchmark
from models.curation.convert import FORMATS, Convert
from models.curation.frame import Files, run_step
from models.errors import BadData, CareError
from models.evaluation.sets import Kind, PairSet, RerankSet, RetrievalSet, find_tasks, write_retrieval
from tests.support.curation import read_out, report_in, run_in, write_lines

CHUNK = {"id": "1", "title": "Insulin", "content": "Lowers glucose.", "contents": "Insulin. Lowers glucose."}
TURNS = {"description": "d", "utterances": ["patient: I cough", "doctor: Drink tea"]}
PASSAGES = {"question": "q?", "positive_ctxs": [{"title": "T", "text": "p"}], "negative_ctxs": [],
            "hard_negative_ctxs": [{"title": "", "text": "n"}, {"title": "", "text": "m"}]}  # fmt: skip
NLI = [{"sentence1": "a", "sentence2": f"s{n}", "gold_label": label} for n, label in
       enumerate(("entailment", "contradiction", "neutral"))]  # fmt: skip
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("pubmed", ".jsonl", json.dumps(CHUNK), {"title": "Insulin", "text": "Lowers glucose."}),
    ("textbooks", ".jsonl", json.dumps(CHUNK | {"title": "Pathology_Robbins"}), {"text": "Lowers glucose."}),
    ("meadow", ".json", json.dumps([{"instruction": "i", "input": "abstract", "output": "title"}]),
     {"title": "title", "text": "abstract"}),
    ("s2orc", ".jsonl", json.dumps({"title": None, "abstract": "a"}), {"text": "a"}),
    ("stackexchange", ".jsonl", json.dumps(["t b", "answer"]), {"query": "t b", "pos": ["answer"]}),
    ("mednli", ".jsonl", "\n".join(map(json.dumps, NLI)), {"query": "a", "pos": ["s0"], "neg": ["s1"]}),
    ("mqp", ".csv", '1,"a, b",c,1\n1,"a, b",d,0\n', {"query": "a, b", "pos": ["c"], "neg": ["d"]}),
    ("medquad", ".csv", "question,answer\nq,a\n", {"query": "q", "pos": ["a"]}),
    ("healthcaremagic", ".json", json.dumps([TURNS]), {"query": "I cough", "pos": ["Drink tea"]}),
    ("eli5", ".jsonl", json.dumps({"title": "t", "answers": {"text": ["a", "b"], "score": [1, 5]}}),
     {"query": "t", "pos": ["b"]}),
    ("msmarco", ".tsv", 'q "x\tp\tn\n', {"query": 'q "x', "pos": ["p"], "neg": ["n"]}),
    ("nq", ".json", json.dumps([PASSAGES]), {"query": "q?", "pos": ["T\np"], "neg": ["n"]}),
    ("nli", ".csv", "sent0,sent1,hard_neg\na,b,c\n", {"query": "a", "pos": ["b"], "neg": ["c"]}),
]  # fmt: skip


def converted(path: Path, format: str, folder: Path) -> list[dict[str, Any]]:
    run_step(Convert(format), Files([path], folder / "out.jsonl"))
    return read_out(folder)


@pytest.mark.parametrize(("format", "ending", "text", "row"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_published_format_becomes_a_row(
    format: str, ending: str, text: str, row: dict[str, Any], zipped: bool, tmp_path: Path
) -> None:
    path = tmp_path / f"raw{ending}{'.gz' if zipped else ''}"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    wording = FORMATS[format].instruction
    expected = row | {"source": format} | ({"instruction": wording} if wording else {})
    assert converted(path, format, tmp_path) == [expected]


def test_parquet_files_of_the_hub_are_read(tmp_path: Path) -> None:
    table = pa.table({"question": ["q", "r"], "answer": ["a", None], "source": ["NIH", "NIH"]})
    pq.write_table(table, tmp_path / "medquad.parquet")
    rows = converted(tmp_path / "medquad.parquet", "medquad", tmp_path)
    assert [(row["query"], row["pos"]) for row in rows] == [("q", ["a"])]
    assert report_in(tmp_path)["dropped"] == {"not a record of medquad": 1}


def test_records_of_another_form_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "raw.jsonl", [{"question": "q", "answer": "a"}, {"question": "q"}, {"question": "", "answer": "a"}]
    )
    assert len(converted(path, "gooaq", tmp_path)) == 1
    assert report_in(tmp_path)["dropped"] == {"not a record of gooaq": 1, "no positive, or an empty text": 1}


def test_rows_that_training_would_reject_are_not_written(tmp_path: Path) -> None:
    asked = [{"question": 5}, {"question": "问", "hard_negative_ctxs": [{"title": "", "text": ""}]}]
    path = write_lines(
        tmp_path / "nq.jsonl", [{**each, "positive_ctxs": [{"title": "a", "text": "b"}]} for each in asked]
    )
    [row] = converted(path, "nq", tmp_path)
    assert (row["query"], row["neg"]) == ("问", [])


def test_a_corpus_has_the_texts_of_the_answers_with_their_titles(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"_id": "d", "title": "题", "text": "文"}])
    write_lines(tmp_path / "queries.jsonl", [{"_id": "q", "text": "问"}])
    (tmp_path / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td\t1\n", encoding="utf-8")
    [document] = converted(corpus, "beir-corpus", tmp_path)
    [row] = converted(tmp_path / "queries.jsonl", "beir", tmp_path)
    assert row["pos"] == [document["text"]] == ["题\n文"]


def test_columns_of_any_type_and_lines_that_are_no_records_are_read(tmp_path: Path) -> None:
    odd = {"when": [datetime(2026, 1, 1)] * 2, "raw": [b"\xff"] * 2, "price": [Decimal("1.5")] * 2}
    pq.write_table(pa.table({"question": ["q", None], "answer": ["a", "b"], **odd}), tmp_path / "m.parquet")
    step = Convert("medquad")
    run_step(step, Files([tmp_path / "m.parquet"], tmp_path / "out.jsonl"), sample=2)
    assert len(read_out(tmp_path)) == 1
    assert '"price": "1.5"' in (tmp_path / "out.jsonl.sample.jsonl").read_text(encoding="utf-8")
    (tmp_path / "m.jsonl").write_text('no JSON\n5\n\n{"question": "q", "answer": "a"}\n', encoding="utf-8")
    assert len(converted(tmp_path / "m.jsonl", "medquad", tmp_path)) == 1
    (tmp_path / "n.jsonl").write_text("5\n" + "".join(json.dumps(each) + "\n" for each in NLI), encoding="utf-8")
    assert len(converted(tmp_path / "n.jsonl", "mednli", tmp_path)) == 1
    (tmp_path / "m.csv").write_bytes(b"\xef\xbb\xbfquestion,answer\r\nq,a\r\n")
    assert len(converted(tmp_path / "m.csv", "medquad", tmp_path)) == 1
    (tmp_path / "none.csv").write_bytes(b"")
    assert converted(tmp_path / "none.csv", "medquad", tmp_path) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.gz", gzip.compress(b"{}\n" * 9999)[:-20], r":\d+: damaged: .* fetch the file again"),
        ("no.jsonl.gz", b"no gzip", ": not gz, or damaged at its beginning; .* fetch it again"),
        ("latin.jsonl", b'{}\n{"question": "f\xe9ver"}\n', ":2: damaged or not UTF-8: .* iconv"),
        ("no.parquet", b"no Parquet", ": damaged, .* fetch the file again"),
        ("latin.csv", b"question,answer\nf\xe9ver,a\n", ":2: damaged or not UTF-8: .* iconv"),
        ("half.json", b'[{"question": "q", ', ": damaged, .* fetch the file again"),
    ],
    ids=["cut", "gzip", "latin", "parquet", "latin table", "half"],  # gzip's content holds the time
)
def test_a_damaged_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=f"{re.escape(name)}{message}"):
        converted(tmp_path / name, "medquad", tmp_path)


def test_lines_of_tables_end_as_any_system_ends_them(tmp_path: Path) -> None:
    content = '\ufeffquestion,answer\r\n问,"一\r\n\r\n二"\n\r问二,答\r'
    (tmp_path / "mixed.csv").write_bytes(content.encode())
    rows = converted(tmp_path / "mixed.csv", "medquad", tmp_path)
    assert [(row["query"], row["pos"]) for row in rows] == [("问", ["一\r\n\r\n二"]), ("问二", ["答"])]


def test_a_beir_folder_gives_its_judged_queries(tmp_path: Path) -> None:
    write_retrieval(tmp_path / "set", ["甲", "乙"], [("问", {"乙"})])
    assert converted(tmp_path / "set" / "queries.jsonl", "beir", tmp_path) == [
        {"query": "问", "pos": ["乙"], "source": "beir"}
    ]


def test_judged_rows_become_sets_with_a_card(tmp_path: Path) -> None:
    judged = {"pos": [[4, 4]], "neg": [[0, 0]]}
    rows = [
        {"query": "问一", "pos": ["甲"], "neg": ["乙"], "judged": judged, "disputed": ["丙", "丁"]},
        {"query": "问二", "pos": ["丁"], "judged": judged},
        {"query": "问三", "pos": ["甲"]},
        {"query": "问四", "pos": ["不在"], "neg": [], "judged": judged},
        {"query": "问五", "pos": ["甲"], "judged": judged, "disputed": 5},
    ]
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in "甲乙丙丁戊"])
    sts: list[dict[str, object]] = [{"text": "不是句对", "neg": ["丙"]}]
    sts += [{"query": f"句{n}", "pos": [f"同{n}"], "neg": [f"难{n}", f"易{n}"]} for n in range(400)]
    agreement = {"passages": 9, "kappa_grades": 0.5, "kappa_relevant": None}
    report = {"run": {"parameters": {"models": ["a", "b"]}}, "agreement": agreement}
    write_lines(tmp_path / "rows.jsonl.report.json", [report])
    folder = tmp_path / "ours"
    step = Benchmark([tmp_path / "rows.jsonl"], [corpus], folder, [write_lines(tmp_path / "sts.jsonl", sts)])
    assert [row["query"] for row in run_in(tmp_path, step, rows)] == ["问一", "问二"]
    tasks = {task.kind: task.data for task in find_tasks(folder)}
    retrieval, rerank, pairs = tasks[Kind.RETRIEVAL], tasks[Kind.RERANK], tasks[Kind.STS]
    assert isinstance(retrieval, RetrievalSet)
    assert retrieval.documents == ["甲", "乙", "丁", "戊"], "丙 is disputed; 丁 answers another query"
    assert [[retrieval.documents[row] for row in rows] for rows in retrieval.answers()] == [["甲"], ["丁"]]
    assert isinstance(rerank, RerankSet)
    assert rerank.queries == ["问一"], "a list needs both kinds"
    assert sorted(rerank.candidates[0]) == sorted([("甲", 2), ("乙", 0)])
    assert isinstance(pairs, PairSet)
    assert 180 < sum(pairs.scores) < 220, "CARE's table 7: 47.9 % of the pairs mean the same"
    kinds = Counter(other[0] for _, other in pairs.pairs)
    assert kinds["同"] == sum(pairs.scores)
    assert abs(kinds["难"] - kinds["易"]) < 40
    card = (folder / "card.md").read_text(encoding="utf-8")
    assert "| retrieval | 2 | 2 | 4 | 1 | 1.00 |" in card
    assert "- a and b: 9 passages, Fleiss' kappa 0.500 on grades and not defined on relevant or not\n" in card
    assert "1 documents on which judges disagreed" in card


def test_a_benchmark_replaces_only_its_own_folder(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": "甲"}])
    rows = [{"query": "问", "pos": ["甲"], "neg": [], "judged": {"pos": [[4]], "neg": []}}]
    folder = tmp_path / "ours"
    for _ in range(2):  # the second time as after a change of the rows
        run_in(tmp_path, Benchmark([tmp_path / "rows.jsonl"], [corpus], folder), rows)
        (tmp_path / "out.jsonl").unlink()
    with pytest.raises(CareError, match=r"holds corpus\.jsonl, and would be replaced"):
        Benchmark([tmp_path / "rows.jsonl"], [corpus], tmp_path)
    assert corpus.is_file()


@pytest.mark.parametrize("report", ["{", "[]", '{"agreement": {}, "run": {"parameters": {"models": []}}}'])
def test_a_report_that_is_not_of_the_judge_step_is_ignored(report: str, tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "corpus.jsonl", [{"text": "甲"}])
    (tmp_path / "rows.jsonl.report.json").write_text(report, encoding="utf-8")
    step = Benchmark([tmp_path / "rows.jsonl"], [corpus], tmp_path / "ours")
    run_in(tmp_path, step, [{"query": "问", "pos": ["甲"], "neg": [], "judged": {"pos": [[4]], "neg": []}}])
    assert "no report of the judge step" in (tmp_path / "ours" / "card.md").read_text(encoding="utf-8")
