from pathlib import Path

import pytest

from models.evaluation.sets import load_retrieval
from models.rows import Pair, read_pairs
from models.training import holdout

PASSAGE = "第{0}条第一句话说的是病因。第{0}条第二句话说的是症状。第{0}条第三句话说的是治疗。第{0}条第四句话说的是预后。"
PAIRS = [Pair(f"方剂{row}", [PASSAGE.format(row)], [], "tcm") for row in range(30)] + [
    Pair(f"疾病{row}", [f"编码{row}", f"名称{row}"], [], "chip-cdn") for row in range(10)
]


def test_help_works_and_a_folder_without_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, code in ((["--help"], 0), ([], 2), ([str(tmp_path), str(tmp_path / "out")], 2)):
        with pytest.raises(SystemExit) as ended:
            holdout.main(given)
        assert ended.value.code == code
    out, errors = capsys.readouterr()
    assert "folder with training files" in out
    assert f"{tmp_path} holds no *.jsonl files" in errors


def test_held_out_queries_are_in_no_training_pair(tmp_path: Path, monkeypatch) -> None:  # noqa: ANN001
    monkeypatch.setattr(holdout, "QUERIES", 5)
    holdout.hold_out(PAIRS, tmp_path)
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
    holdout.hold_out(PAIRS, tmp_path / "a")
    holdout.hold_out(list(reversed(PAIRS)), tmp_path / "b")
    assert (tmp_path / "a/tcm/queries.jsonl").read_bytes() == (tmp_path / "b/tcm/queries.jsonl").read_bytes()
