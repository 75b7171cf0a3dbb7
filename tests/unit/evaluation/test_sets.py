import gzip
import json
from pathlib import Path

import pytest

from models.errors import BadData
from models.evaluation.sets import find_sets, load_pairs, load_rerank, load_retrieval


def write_set(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d1", "title": "题", "text": "文"}\n{"_id": "d2", "text": "另一"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "问"}\n')
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\n")
    return folder


def test_a_set_is_read_with_title_before_text(tmp_path: Path) -> None:
    data = load_retrieval(write_set(tmp_path / "one"))
    assert data.documents == ["题\n文", "另一"]
    assert data.qrels == {"q1": {"d2": 1}}


def test_sets_may_share_the_corpus_of_the_folder_above(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_set(tmp_path / name)
        (tmp_path / name / "corpus.jsonl").unlink()
    lines = [json.dumps({"_id": "d2", "text": "共"})]
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    first, second = load_retrieval(tmp_path / "a"), load_retrieval(tmp_path / "b")
    assert first.documents is second.documents


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("qrels.tsv", "h\nq1\tnone\t1\n", r"qrels.tsv:2: document 'none' is not in the corpus"),
        ("qrels.tsv", "h\nq9\td1\t1\n", r"qrels.tsv:2: query 'q9' is not in queries.jsonl"),
        ("qrels.tsv", "h\nq1 d1 1\n", r"qrels.tsv:2: not 'query-id"),
        ("qrels.tsv", "", r"qrels.tsv: no judgements"),
        (
            "queries.jsonl",
            '{"_id": "q1", "text": "问"}\n{"_id": "q2", "text": "x"}\n',
            "query 'q2' .* has no judgement",
        ),
        ("queries.jsonl", "{broken\n", r"queries.jsonl:1: not JSON"),
        ("queries.jsonl", '{"_id": "q1"}\n', r"queries.jsonl:1: lacks text"),
        ("corpus.jsonl", "", r"corpus.jsonl: the corpus is empty"),
    ],
)
def test_bad_data_is_named_with_file_and_line(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = write_set(tmp_path / "set")
    (folder / file).write_text(content)
    with pytest.raises(BadData, match=message):
        load_retrieval(folder)


def test_a_set_without_a_corpus_says_where_it_looked(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(BadData, match="neither here nor in the folder above"):
        load_retrieval(folder)


def test_sets_are_found_and_training_folders_left_out(tmp_path: Path) -> None:
    write_set(tmp_path / "one")
    write_set(tmp_path / "two" / "train")
    (tmp_path / "rerank").mkdir()
    (tmp_path / "rerank" / "r.jsonl").write_text('{"query": "q", "candidates": [{"text": "t", "grade": 2}]}\n')
    (tmp_path / "sts").mkdir()
    (tmp_path / "sts" / "s.jsonl").write_text('{"a": "x", "b": "y", "score": 3}\n')
    retrieval, rerank, pairs = find_sets(tmp_path)
    assert retrieval == [tmp_path / "one"]
    assert load_rerank(rerank[0]).candidates == [[("t", 2)]]
    assert load_pairs(pairs[0]).scores == [3.0]
    with pytest.raises(BadData, match="no evaluation set"):
        find_sets(tmp_path / "sts")
