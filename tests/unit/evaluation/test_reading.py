import codecs
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from models.errors import BadData
from models.evaluation.sets import Kind, find_tasks, load_pairs, load_rerank, load_retrieval
from tests.support.evaluation import write_lines, write_set

HEADER = "query-id\tcorpus-id\tscore\n"


def test_a_set_is_read_with_title_before_text(tmp_path: Path) -> None:
    data = load_retrieval(write_set(tmp_path / "one"))
    assert data.name == "one"
    assert data.documents == ["题\n文", "另一"]
    assert data.qrels == {"q1": {"d2": 1}}


def test_sets_may_share_the_corpus_of_the_folder_above(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (write_set(tmp_path / name) / "corpus.jsonl").unlink()
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write('{"_id": "d2", "text": "共"}\n')
    first, second = load_retrieval(tmp_path / "a"), load_retrieval(tmp_path / "b")
    assert first.documents == ["共"]
    assert first.documents is second.documents


def test_a_corpus_that_changed_is_read_again(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    load_retrieval(folder)
    write_lines(folder / "corpus.jsonl", [{"_id": "d2", "text": "新的文字"}])
    assert load_retrieval(folder).documents == ["新的文字"]


def test_only_the_judged_queries_of_a_split_count(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    write_lines(folder / "queries.jsonl", [{"_id": "q0", "text": "训练"}, {"_id": "q1", "text": "问"}])
    (folder / "qrels").mkdir()
    (folder / "qrels.tsv").rename(folder / "qrels" / "dev.tsv")
    assert load_retrieval(folder, "dev").queries == ["问"]
    with pytest.raises(BadData, match=r"qrels/test\.tsv: cannot be read: No such file"):
        load_retrieval(folder)


def test_a_judgement_may_be_repeated_but_not_contradicted(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    (folder / "qrels.tsv").write_text(f"{HEADER}q1\td2\t1\nq1\td2\t1\n")
    assert load_retrieval(folder).qrels == {"q1": {"d2": 1}}
    (folder / "qrels.tsv").write_text(f"{HEADER}q1\td2\t1\nq1\td2\t2\n")
    with pytest.raises(BadData, match=r"qrels\.tsv:3: document 'd2' of query 'q1' was given grade 1 before"):
        load_retrieval(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("qrels.tsv", f"{HEADER}q1\tnone\t1\n", "qrels.tsv:2: document 'none' is not in the corpus"),
        ("qrels.tsv", f"{HEADER}q1\td1\t1\nq9\td1\t1\n", "qrels.tsv:3: query 'q9' is not in queries.jsonl"),
        ("qrels.tsv", f"{HEADER}q1 d1 1\n", "qrels.tsv:2: not 'query-id<TAB>corpus-id<TAB>score'"),
        ("qrels.tsv", f"{HEADER}q1\td1\t{10**9}\n", "with a whole number of at most nine digits"),
        ("qrels.tsv", f"{HEADER}q1\td1\t0.5\n", "qrels.tsv:2: not 'query-id<TAB>corpus-id<TAB>score'"),
        ("qrels.tsv", "q1\td1\t1\nq1\td2\t1\n", "qrels.tsv:1: a judgement where the header"),
        ("qrels.tsv", HEADER, "qrels.tsv: no judgements"),
        ("qrels.tsv", "", "qrels.tsv: no judgements"),
        ("qrels.tsv", b"h\nq1\t\xff\t1\n", "qrels.tsv:2: damaged or not UTF-8"),
        ("qrels.tsv", f"{HEADER}q1\td1\t0\n", "queries.jsonl:1: query 'q1' has no relevant document in qrels.tsv"),
        ("queries.jsonl", '{"_id": "q1", "text": "a"}\n{"_id": "q2", "text": "b"}\n',
         "queries.jsonl:2: query 'q2' has no relevant document in qrels.tsv"),
        ("queries.jsonl", "", "queries.jsonl: there is no query"),
        ("queries.jsonl", "{broken\n", "queries.jsonl:1: not JSON"),
        ("queries.jsonl", b'{"_id": "q1", "text": "\xff"}\n', "queries.jsonl:1: damaged or not UTF-8"),
        ("queries.jsonl", "[]\n", "queries.jsonl:1: not an object"),
        ("queries.jsonl", '{"_id": "q1"}\n', "queries.jsonl:1: lacks text"),
        ("queries.jsonl", '{"_id": 1, "text": "a"}\n', "queries.jsonl:1: _id is not a text"),
        ("queries.jsonl", '{"_id": "q1", "text": " "}\n', "queries.jsonl:1: text is empty"),
        ("queries.jsonl", '{"_id": "q1", "text": "a"}\n{"_id": "q1", "text": "b"}\n',
         "queries.jsonl:2: id 'q1' was given in line 1 already"),
        ("corpus.jsonl", "", "corpus.jsonl: the corpus is empty"),
        ("corpus.jsonl", '{"_id": "d1", "text": "a", "title": 3}\n', "corpus.jsonl:1: title is not a text"),
        ("corpus.jsonl", '{"_id": "d1", "text": null}\n', "corpus.jsonl:1: text is not a text"),
    ],
)  # fmt: skip
def test_bad_data_is_named_with_file_and_line(tmp_path: Path, file: str, content: str | bytes, message: str) -> None:
    folder = write_set(tmp_path / "set")
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadData, match=re.escape(message)):
        load_retrieval(folder)


def test_byte_order_marks_line_ends_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    plain = load_retrieval(folder)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(codecs.BOM_UTF8 + content.replace(b"\n", b"\r\n") + b" \r\n")
    assert load_retrieval(folder) == plain


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[: len(whole) // 2], "corpus.jsonl.gz:1: damaged: "),
        (lambda whole: b"no gzip", "corpus.jsonl.gz: not gz, or damaged at its beginning; "),
        (lambda whole: whole[:12] + b"x" * 40, "corpus.jsonl.gz:1: damaged: "),
    ],
    ids=["cut", "plain", "changed"],
)
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    folder = write_set(tmp_path / "set")
    whole = gzip.compress((folder / "corpus.jsonl").read_bytes())
    (folder / "corpus.jsonl").unlink()
    (folder / "corpus.jsonl.gz").write_bytes(damage(whole))
    with pytest.raises(BadData, match=re.escape(message) + ".*fetch"):
        load_retrieval(folder)


def test_a_set_without_a_corpus_names_the_searched_folders(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set")
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(BadData, match="neither here nor in the folder above"):
        load_retrieval(folder)


def test_candidates_of_the_higher_grades_are_relevant(tmp_path: Path) -> None:
    candidates = [{"text": "t", "grade": 2}, {"text": "u", "grade": 1}]
    lists = load_rerank(write_lines(tmp_path / "r.jsonl", [{"query": "q", "candidates": candidates}]))
    assert lists.candidates == [[("t", 2), ("u", 1)]]
    assert lists.relevant == 2
    binary = write_lines(tmp_path / "b.jsonl", [{"query": "q", "candidates": candidates[1:]}])
    assert load_rerank(binary).relevant == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"query": "q", "candidates": []}, "r.jsonl:1: candidates is not a list of at least one"),
        ({"query": "q"}, "r.jsonl:1: candidates is not a list of at least one"),
        ({"query": 1, "candidates": [{"text": "t", "grade": 1}]}, "r.jsonl:1: query is not a text"),
        ({"query": "q", "candidates": ["t"]}, "r.jsonl:1: candidate 1 is not an object {text, grade}"),
        ({"query": "q", "candidates": [{"text": "t"}]}, "r.jsonl:1: candidate 1: grade None is not a whole number"),
        (
            {"query": "q", "candidates": [{"text": "t", "grade": 10**9}]},
            "is not a whole number of at most nine digits",
        ),
        ({"query": "q", "candidates": [{"text": "t", "grade": True}]}, "candidate 1: grade True is not a whole number"),
        ({"query": "q", "candidates": [{"text": "t", "grade": 1}, {"grade": 1}]}, "r.jsonl:1: candidate 2: lacks text"),
        ({"query": "q", "candidates": [{"text": "t", "grade": 0}]}, "r.jsonl: no candidate has a grade above 0"),
    ],
)
def test_bad_lists_are_named_with_the_line(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(BadData, match=re.escape(message)):
        load_rerank(write_lines(tmp_path / "r.jsonl", [row]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": "x", "b": "y", "score": NaN}', "s.jsonl:2: not JSON"),
        ('{"a": "x", "b": "y", "score": "3"}', "s.jsonl:2: score '3' is not a finite number"),
        ('{"a": "x", "b": "y", "score": true}', "s.jsonl:2: score True is not a finite number"),
        ('{"a": "x", "score": 1}', "s.jsonl:2: lacks b"),
        ('{"a": "x", "b": "", "score": 1}', "s.jsonl:2: b is empty"),
        ('{"a": "x", "b": "y", "score": 0}', "s.jsonl: a correlation needs pairs of at least two different scores"),
    ],
)
def test_bad_pairs_are_named_with_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(f'{{"a": "x", "b": "y", "score": 0}}\n{line}\n')
    with pytest.raises(BadData, match=re.escape(message)):
        load_pairs(path)


def test_an_empty_file_of_lists_or_pairs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for read in (load_rerank, load_pairs):
        with pytest.raises(BadData, match=r"empty\.jsonl: "):
            read(tmp_path / "empty.jsonl")


def test_every_set_below_a_folder_is_found_and_training_folders_are_left_out(tmp_path: Path) -> None:
    # The folder itself may be below one that is called train.
    root = tmp_path / "train" / "data"
    write_set(root / "alone")
    write_set(root / "group" / "one")
    write_set(root / "linking" / "names")
    write_set(root / "alone" / "train")
    write_lines(root / "rerank" / "r.jsonl", [{"query": "q", "candidates": [{"text": "t", "grade": 2}]}])
    pairs = [{"a": "x", "b": "y", "score": 3}, {"a": "x", "b": "z", "score": 1.5}]
    write_lines(root / "sts" / "s.jsonl", pairs)
    write_lines(root / "train" / "sts" / "t.jsonl", pairs)
    tasks = [(task.benchmark, task.name, task.kind, task.main_metric) for task in find_tasks(root)]
    assert tasks == [
        ("data", "alone", Kind.RETRIEVAL, "nDCG@10"),
        ("group", "one", Kind.RETRIEVAL, "nDCG@10"),
        ("linking", "names", Kind.LINKING, "MRR@5"),
        ("rerank", "r", Kind.RERANK, "MAP@10"),
        ("sts", "s", Kind.STS, "Pearson"),
    ]
    assert [task.name for task in find_tasks(root / "sts")] == ["s"]


def test_linked_sets_are_found_once_and_link_cycles_end(tmp_path: Path) -> None:
    write_set(tmp_path / "disk" / "one")
    write_lines(tmp_path / "disk" / "lists" / "r.jsonl", [{"query": "q", "candidates": [{"text": "t", "grade": 1}]}])
    root = tmp_path / "data"
    root.mkdir()
    (root / "a").symlink_to(tmp_path / "disk" / "one")
    (root / "b").symlink_to(tmp_path / "disk" / "one")
    (root / "rerank").symlink_to(tmp_path / "disk" / "lists")
    (root / "up").symlink_to(root)
    assert [(task.name, task.kind) for task in find_tasks(root)] == [("one", Kind.RETRIEVAL), ("r", Kind.RERANK)]


def test_a_folder_may_be_a_set_itself(tmp_path: Path) -> None:
    (task,) = find_tasks(write_set(tmp_path / "examples"))
    assert (task.benchmark, task.name) == ("examples", "examples")


def test_queries_without_judgements_are_an_error(tmp_path: Path) -> None:
    (write_set(tmp_path / "set") / "qrels.tsv").unlink()
    with pytest.raises(BadData, match=r"qrels\.tsv: cannot be read: No such file"):
        find_tasks(tmp_path)


def test_a_folder_without_a_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no evaluation set"):
        find_tasks(tmp_path)
    with pytest.raises(BadData, match="no such folder"):
        find_tasks(tmp_path / "nowhere")
