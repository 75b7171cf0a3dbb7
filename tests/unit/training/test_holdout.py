import json
from pathlib import Path

import pytest

from models.evaluation.sets import load_retrieval
from models.rows import Pair, read_pairs, write_lines
from models.training import holdout

PASSAGE = "第{0}条第一句话说的是病因。第{0}条第二句话说的是症状。第{0}条第三句话说的是治疗。第{0}条第四句话说的是预后。"
PAIRS = [Pair(f"方剂{row}", [PASSAGE.format(row)], [], "tcm") for row in range(30)] + [
    Pair(f"疾病{row}", [f"编码{row}", f"名称{row}"], [], "chip-cdn") for row in range(10)
]
ROWS = [({"query": pair.query, "pos": pair.positives, "source": pair.source}, pair) for pair in PAIRS]


def test_help_works_and_a_folder_without_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, code in ((["--help"], 0), ([], 2), ([str(tmp_path), str(tmp_path / "out")], 2)):
        with pytest.raises(SystemExit) as ended:
            holdout.main(given)
        assert ended.value.code == code
    out, errors = capsys.readouterr()
    assert "folder with training files" in out
    assert f"{tmp_path} holds no *.jsonl files" in errors


def test_held_out_queries_are_in_no_training_pair(tmp_path: Path) -> None:
    holdout.hold_out(ROWS, tmp_path, queries=5)
    kept = {pair.query for pair in read_pairs(tmp_path / "pairs.jsonl")}
    for name in ("tcm", "chip-cdn"):
        held = load_retrieval(tmp_path / name)
        assert len(held.queries) == 5
        assert not kept & set(held.queries)
    assert len(load_retrieval(tmp_path / "chip-cdn").qrels["q0"]) == 2
    cloze = load_retrieval(tmp_path / "cloze-tcm")
    for query, grades in zip(cloze.queries, cloze.qrels.values(), strict=True):
        (answer,) = grades
        assert query not in cloze.documents[cloze.document_ids.index(answer)]


def test_the_split_is_the_same_every_time(tmp_path: Path) -> None:
    holdout.hold_out(ROWS, tmp_path / "a")
    holdout.hold_out(list(reversed(ROWS)), tmp_path / "b")
    assert (tmp_path / "a/tcm/queries.jsonl").read_bytes() == (tmp_path / "b/tcm/queries.jsonl").read_bytes()


def test_other_rows_are_kept_as_they_were_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        {"query": f"q{n}", "pos": ["d"], "source": "smile", "instruction": "i", "hypothetical": ["h"], "id": n}
        for n in range(5)
    ]
    untitled = [{"text": PASSAGE.format(n), "source": source} for n in range(5) for source in ("smile", "tcm")]
    write_lines(tmp_path / "mine.jsonl", [*asked, *untitled, {"query": "q", "pos": ["d"]}])
    holdout.main([str(tmp_path), str(tmp_path / "out"), "--queries", "2"])
    kept = [json.loads(line) for line in (tmp_path / "out/pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    held = load_retrieval(tmp_path / "out/smile").queries
    assert len(held) == 2
    others = [row for row in asked if row["query"] not in held]
    assert kept == [*others, *untitled, {"query": "q", "pos": ["d"], "source": "mine"}]
    assert not (tmp_path / "out/tcm").exists()
    assert capsys.readouterr().err == "no development set of 1 rows, whose sources are in no group: mine (1)\n"


def test_a_set_has_as_many_documents_as_are_asked_for_and_all_answers(tmp_path: Path) -> None:
    for queries, documents, length in ((5, 12, 12), (5, 3, 5), (30, 100, 30)):
        holdout.hold_out(ROWS, tmp_path / f"{queries}-{documents}", queries, documents)
        held = load_retrieval(tmp_path / f"{queries}-{documents}/tcm")
        assert (len(held.queries), len(held.documents)) == (queries, length)


def test_sets_of_other_sources_take_the_place_of_the_bundled_groups(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write_lines(tmp_path / "train/mine.jsonl", [{"query": f"q{n}", "pos": [f"d{n}"]} for n in range(9)])
    write_lines(tmp_path / "train/tcm.jsonl", [row for row, _ in ROWS])
    write_lines(tmp_path / "train/tcm.jsonl.report.json", [{"run": "of care curate"}])
    holdout.main([str(tmp_path / "train"), str(tmp_path / "out"), "--queries", "4", "--group", "my-pairs=mine"])
    held = load_retrieval(tmp_path / "out/my-pairs")
    assert (len(held.queries), len(held.documents)) == (4, 9)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["my-pairs", "pairs.jsonl"]
    kept = {pair.query for pair in read_pairs(tmp_path / "out/pairs.jsonl")}
    assert kept == {pair.query for pair in PAIRS} | {f"q{n}" for n in range(9)} - set(held.queries)


@pytest.mark.parametrize("group", ["a", "a=", "a=b,", "../a=b", "=b"])
def test_a_group_that_names_no_folder_or_no_source_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], group: str
) -> None:
    with pytest.raises(SystemExit):
        holdout.main([str(tmp_path), str(tmp_path / "out"), "--group", group])
    assert "is not NAME=SOURCE,SOURCE" in capsys.readouterr().err


@pytest.mark.parametrize("groups", [("g=a", "g=b"), ("tcm=a", "cloze-tcm=b")])
def test_two_sets_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: tuple[str, str]
) -> None:
    write_lines(tmp_path / "mine.jsonl", [{"query": "q", "pos": ["d"], "source": source} for source in "ab"])
    with pytest.raises(SystemExit):
        holdout.main([str(tmp_path), str(tmp_path / "out"), "--group", groups[0], "--group", groups[1]])
    assert f"--group {groups[1][:-2]}: two sets of this name; give all sources" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_group_of_an_unknown_source_and_an_out_that_is_a_file_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "mine.jsonl", [{"query": "q", "pos": ["d"], "source": source} for source in "ab"])
    with pytest.raises(SystemExit, match=r"^holdout: --group g: no row is of typo; there are a, b$"):
        holdout.main([str(tmp_path), str(tmp_path / "out"), "--group", "g=a,typo"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match=r"^holdout: .*mine\.jsonl: File exists; name a folder that can be written$"):
        holdout.main([str(tmp_path), str(tmp_path / "mine.jsonl"), "--group", "g=a"])


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"query": "a", "pos": []}\n')
    with pytest.raises(SystemExit, match=r"^holdout: .*a\.jsonl:1: pos must hold at least one text"):
        holdout.main([str(tmp_path), str(tmp_path / "out")])
