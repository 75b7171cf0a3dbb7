"""Corpus readers of every format, and the rules for bad rows."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indexer.corpus import Document, FieldMap, Rejects, read_corpus
from indexer.errors import BadCorpus
from indexer.sources import find_files, read_rows
from indexer.store.files import DiskDict
from tests.unit.indexer.support import write_lines

GOOD = {"_id": "a", "title": "标题", "text": "正文", "metadata": {"kind": "drug"}}


@contextmanager
def no_ids() -> Iterator[DiskDict]:
    with TemporaryDirectory() as folder, closing(DiskDict(Path(folder, "ids"))) as ids:
        yield ids


def read(*paths: Path, fields: FieldMap | None = None) -> list[Document]:
    with no_ids() as ids:
        return list(read_corpus(paths, fields or FieldMap(), Rejects(None), ids))


def read_skipping(path: Path, rejects_file: Path) -> tuple[list[Document], list[dict]]:
    with Rejects(rejects_file) as rejects, no_ids() as ids:
        documents = list(read_corpus([path], FieldMap(), rejects, ids))
    lines = [json.loads(line) for line in rejects_file.read_bytes().splitlines()] if rejects_file.exists() else []
    assert len(lines) == rejects.count
    return documents, lines


def test_json_lines_give_documents_with_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD, b"", {"_id": 7, "text": "untitled"})
    assert read(path) == [
        Document("a", "标题", "正文", {"kind": "drug"}, f"{path}:1"),
        Document("7", "", "untitled", {}, f"{path}:3"),
    ]


def test_a_number_field_is_kept_without_being_listed_as_metadata(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('_id,text,year,metadata\n1,药,2024,"{""dose"": ""5""}"\n2,药,,\n', encoding="utf-8")
    fields = FieldMap(number_fields=("year", "dose"))
    assert [document.metadata for document in read(path, fields=fields)] == [{"year": 2024, "dose": 5}, {"year": None}]
    assert "year" in fields.used_names()
    with pytest.raises(BadCorpus, match=r"no row has a field named yaer; the rows have _id, metadata, text, year"):
        read(path, fields=FieldMap(number_fields=("yaer",)))


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert read(path)[0].id == "a"


def test_gzip_is_read_like_the_file_inside(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert read(path)[0].text == "正文"


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.csv.gz"])
@pytest.mark.parametrize("begins_well", [False, True])
def test_a_file_that_is_not_gzip_is_named(tmp_path: Path, name: str, begins_well: bool) -> None:
    path = tmp_path / name
    path.write_bytes(begins_well * gzip.compress(b"") + json.dumps(GOOD).encode())
    with pytest.raises(BadCorpus, match=r"is not gzip from beginning to end .* leave \.gz out of its name"):
        read(path)


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 1000)[:-20])
    with pytest.raises(BadCorpus, match=r"c\.jsonl\.gz cannot be read to its end"):
        read(path)


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**63) - 1, 10**30])
def test_integers_of_more_than_64_bits_are_refused_instead_of_rounded(tmp_path: Path, number: int) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD | {"metadata": {"pid": number}})
    with pytest.raises(BadCorpus, match="pid is a whole number of more than 64 bits"):
        read(path)


@pytest.mark.parametrize(("metadata", "message"), [
    ('{"pid": 123456789012345678901}', "pid is a whole number of more than 64 bits"),
    ('{"pid": 1234567890123456789, "x": ' + 1000 * "[" + 1000 * "]" + "}", "is not a JSON object"),
])  # fmt: skip
def test_metadata_as_json_text_has_the_rules_of_an_object(tmp_path: Path, metadata: str, message: str) -> None:
    with pytest.raises(BadCorpus, match=message):
        read(write_lines(tmp_path / "c.jsonl", GOOD | {"metadata": metadata}))


def test_a_row_that_is_nested_too_deeply_is_a_bad_row(tmp_path: Path) -> None:
    row = b'{"_id": "1", "text": "1234567890123456789", "metadata": {"x": ' + 1000 * b"[" + 1000 * b"]" + b"}}"
    with pytest.raises(BadCorpus, match="nested too deeply"):
        read(write_lines(tmp_path / "c.jsonl", row))


@pytest.mark.parametrize("written", ["1_000", "inf", "-1e999"])
def test_a_number_that_json_lacks_is_refused(tmp_path: Path, written: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD | {"price": written})
    with pytest.raises(BadCorpus, match=r"price is not a (finite )?number"):
        read(path, fields=FieldMap(number_fields=("price",)))


def test_integers_of_64_bits_are_read_exactly(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "c.jsonl", GOOD | {"metadata": {"pid": 2**63 - 1}})
    table = tmp_path / "c.csv"
    table.write_text("_id,text,pid\n1,x,110101199001011235\n", encoding="utf-8")
    fields = FieldMap(metadata_fields=("pid",), number_fields=("pid",))
    assert read(lines)[0].metadata == {"pid": 2**63 - 1}
    assert read(table, fields=fields)[0].metadata == {"pid": 110101199001011235}


def test_csv_is_read_with_mapped_fields(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('doc_id,body,year,dept\n1,"two\nlines",2020,内科\n2,text,,\n', encoding="utf-8")
    fields = FieldMap(id="doc_id", text="body", metadata_fields=("year", "dept"), number_fields=("year",))
    assert read(path, fields=fields) == [
        Document("1", "", "two\nlines", {"year": 2020.0, "dept": "内科"}, f"{path}:2"),
        Document("2", "", "text", {"year": None, "dept": None}, f"{path}:4"),
    ]


def test_csv_metadata_column_is_a_json_object(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text('_id,text,metadata\n1,t,"{""kind"": ""drug""}"\n', encoding="utf-8")
    assert read(path)[0].metadata == {"kind": "drug"}


def test_csv_texts_may_exceed_the_librarys_default_limit(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(f"_id,text\n1,{'长' * 200_000}\n", encoding="utf-8")
    assert len(read(path)[0].text) == 200_000


def test_malformed_csv_rows_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes(b'_id,text\n1,a,b\n2,\xff\n3,good\n4,"x"y\n5,"never closed\n6,lost\n')
    documents, rejects = read_skipping(path, tmp_path / "rejects.jsonl")
    assert [d.id for d in documents] == ["3"]
    assert [(r["line"], r["raw"]) for r in rejects] == [
        (2, "1,a,b"),
        (3, "2,\\xff"),
        (5, '4,"x"y'),
        (6, '5,"never closed\n6,lost'),
    ]
    assert "3 columns, the first line names 2" in rejects[0]["reason"]
    assert "not UTF-8" in rejects[1]["reason"]
    assert "the record takes 2 lines" in rejects[3]["reason"]


def test_csv_with_a_duplicate_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("_id,text,text\n1,a,b\n", encoding="utf-8")
    with pytest.raises(BadCorpus, match="names a column twice"):
        read(path)


def test_parquet_structs_dates_and_missing_numbers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    rows = [
        {"_id": 1, "text": "a", "metadata": {"tags": ["x", "y"]}, "day": date(2025, 1, 2), "score": float("nan")},
        {"_id": 2, "text": "b", "metadata": None, "day": None, "score": 0.5},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    documents = read(path, fields=FieldMap(metadata_fields=("day", "score")))
    assert [d.metadata for d in documents] == [
        {"tags": ["x", "y"], "day": "2025-01-02", "score": None},
        {"day": None, "score": 0.5},
    ]
    assert documents[1].place == f"{path}:2"


def test_parquet_timestamps_sort_as_texts(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([{"_id": "1", "text": "a", "at": datetime(2025, 1, 2, 3, 4)}]), path)
    assert read(path, fields=FieldMap(metadata_fields=("at",)))[0].metadata == {"at": "2025-01-02T03:04:00"}


def test_parquet_decimals_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    values = {"price": Decimal("12.50"), "count": Decimal("9007199254740993")}
    pq.write_table(pa.Table.from_pylist([{"_id": "1", "text": "a", **values}]), path)
    found = read(path, fields=FieldMap(metadata_fields=("price", "count")))[0].metadata
    assert found == {"price": 12.5, "count": 2**53 + 1}
    assert type(found["count"]) is int


def test_parquet_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([["1"], ["a"], ["b"]], names=["_id", "text", "text"]), tmp_path / "c.parquet")
    with pytest.raises(BadCorpus, match="names a column twice"):
        read(tmp_path / "c.parquet")


@pytest.mark.parametrize(
    "column",
    [pa.array([b"\xff"]).view(pa.string()), pa.array([10**18], pa.timestamp("us"))],
    ids=["not-utf-8", "beyond-year-9999"],
)
def test_parquet_with_values_that_python_cannot_hold_is_refused(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"_id": ["1"], "text": ["a"], "other": column}), tmp_path / "c.parquet")
    with pytest.raises(BadCorpus, match="not readable Parquet"):
        read(tmp_path / "c.parquet")


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(BadCorpus, match="not readable Parquet"):
        read(path)


def test_folder_and_several_files_are_read_in_order(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", {"_id": "2", "text": "t"})
    write_lines(tmp_path / "a.jsonl", {"_id": "1", "text": "t"})
    write_lines(tmp_path / ".hidden.jsonl", {"_id": "0", "text": "t"})
    (tmp_path / "README.md").write_text("no corpus")
    other = write_lines(tmp_path / "c.ndjson", {"_id": "3", "text": "t"}).rename(tmp_path.parent / "c.ndjson")
    assert [d.id for d in read(other, tmp_path)] == ["3", "1", "2"]


def test_beir_folder_gives_its_corpus_and_not_its_queries(tmp_path: Path) -> None:
    write_lines(tmp_path / "corpus.jsonl", GOOD)
    write_lines(tmp_path / "queries.jsonl", {"_id": "q", "text": "a question"})
    assert [d.id for d in read(tmp_path)] == ["a"]


BAD_ROWS = [
    (b'{"_id": "x", ', "not JSON"),
    (b'{"_id": "x", "text": NaN}', "not JSON"),
    (b'["x", "text"]', "not a JSON object"),
    (b'{"_id": "x", "text": "\xff\xfe"}', r"not UTF-8 \(byte 23\)"),
    (rb'{"_id": "x", "text": "\ud800"}', "not JSON"),
    ({"text": "t"}, "no id in field _id"),
    ({"_id": "", "text": "t"}, "no id in field _id"),
    ({"_id": None, "text": "t"}, "no id in field _id"),
    ({"_id": 1.5, "text": "t"}, "neither text nor a whole number"),
    ({"_id": True, "text": "t"}, "neither text nor a whole number"),
    ({"_id": "x"}, "neither text in field text nor a title in field title"),
    ({"_id": "x", "title": "", "text": " \n"}, "neither text in field text nor a title in field title"),
    ({"_id": "x", "text": "\u200b"}, "neither text in field text nor a title in field title"),
    ({"_id": "x", "text": 5}, "the text in field text is not text"),
    ({"_id": "x", "text": "t", "title": ["t"]}, "the title in field title is not text"),
    ({"_id": "a", "text": "again"}, r"repeated id 'a', first at .*c\.jsonl:1"),
    ({"_id": "x", "text": "t", "metadata": [1]}, "metadata is not an object"),
    ({"_id": "x", "text": "t", "metadata": "{"}, "not a JSON object"),
    ({"_id": "x", "text": "t", "metadata": {"k": {"deep": 1}}}, "metadata field k is neither text"),
    ({"_id": "x", "text": "t", "metadata": {"k": [1, 2]}}, "metadata field k is neither text"),
    ({"_id": "x", "text": "t", "metadata": {"kind": 3}}, r"kind is a number here and text at .*c\.jsonl:1"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_bad_row_stops_the_build_with_its_place(tmp_path: Path, row: object, reason: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD, row)
    with pytest.raises(BadCorpus, match=rf"1 bad rows: .*c\.jsonl:2: .*{reason}.*--skip-bad"):
        read(path)


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_bad_row_is_set_aside_and_the_rest_is_read(tmp_path: Path, row: object, reason: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD, row, {"_id": "z", "text": "last"})
    documents, rejects = read_skipping(path, tmp_path / "deep" / "rejects.jsonl")
    assert [d.id for d in documents] == ["a", "z"]
    assert [(r["file"], r["line"]) for r in rejects] == [(str(path), 2)]
    raw = row.decode("utf-8", errors="backslashreplace") if isinstance(row, bytes) else row
    assert (rejects[0]["raw"] if isinstance(row, bytes) else json.loads(rejects[0]["raw"])) == raw


def test_the_error_lists_the_first_bad_rows_and_their_number(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", *[{"_id": str(i)} for i in range(9)], GOOD)
    with pytest.raises(BadCorpus, match=r"^9 bad rows: .*c\.jsonl:5: .*; and 4 more\. ") as caught:
        read(path)
    assert "c.jsonl:6" not in str(caught.value)


def test_a_rejected_row_does_not_claim_its_id(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", {"_id": "x"}, {"_id": "x", "text": "t"})
    documents, rejects = read_skipping(path, tmp_path / "rejects.jsonl")
    assert [d.text for d in documents] == ["t"]
    assert len(rejects) == 1


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_corpus_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadCorpus, match="empty corpus cannot be searched"):
        read(path)


def test_corpus_of_bad_rows_only_is_refused_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(BadCorpus, match=r"no documents \(1 bad rows, set aside in .*rejects\.jsonl\)"):
        read_skipping(write_lines(tmp_path / "c.jsonl", b"{"), tmp_path / "rejects.jsonl")


def test_a_csv_with_an_invalid_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text('"_id"x,text\n1,a\n')
    with pytest.raises(BadCorpus, match="its first line, the columns, is not CSV"):
        read(tmp_path / "c.csv")


def test_a_document_may_have_only_a_title(tmp_path: Path) -> None:
    rows = [{"_id": "1", "title": "头痛", "text": ""}, {"_id": "2", "title": "发热", "text": None}, GOOD]
    assert [(d.title, d.text) for d in read(write_lines(tmp_path / "c.jsonl", *rows))] == [
        ("头痛", ""),
        ("发热", ""),
        ("标题", "正文"),
    ]


def test_a_missing_text_column_is_refused_even_if_rows_have_titles(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", {"_id": "1", "title": "头痛", "body": "头痛可由感冒引起。"})
    with pytest.raises(BadCorpus, match=r"no row has a field named text; .* _id, body, title: .*\(--field text=NAME"):
        read(path)
    assert read(path, fields=FieldMap(text="body"))[0].text == "头痛可由感冒引起。"


def test_a_file_named_twice_repeats_every_id(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD)
    with pytest.raises(BadCorpus, match=rf"repeated id 'a', first at {path}:1"):
        read(path, path)


def test_the_error_for_a_repeated_id_names_its_first_file(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f"{name}.jsonl", GOOD | {"_id": name}) for name in "pqr"]
    paths.append(write_lines(tmp_path / "s.jsonl", b"", GOOD | {"_id": "q"}))
    with pytest.raises(BadCorpus, match=rf"s\.jsonl:2: repeated id 'q', first at {paths[1]}:1"):
        read(*paths)


def test_mapped_field_that_no_row_has_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD)
    with pytest.raises(BadCorpus, match="no row has a field named departmnt"):
        read(path, fields=FieldMap(metadata_fields=("departmnt",)))


def test_paths_without_a_corpus_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BadCorpus, match="does not exist"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(BadCorpus, match="of no known kind"):
        read(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(BadCorpus, match="is neither a file nor a folder"):
        read(tmp_path / "pipe.jsonl")
    with pytest.raises(BadCorpus, match="holds no corpus file"):
        read(tmp_path)


def test_no_rejects_file_is_made_without_rejects(tmp_path: Path) -> None:
    read_skipping(write_lines(tmp_path / "c.jsonl", GOOD), tmp_path / "rejects.jsonl")
    assert not (tmp_path / "rejects.jsonl").exists()


def test_the_error_for_a_missing_field_lists_the_columns(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "c.jsonl", {"_id": "1", "title": "t", "body": "x"}, {"_id": "2", "title": "t", "url": "y"}
    )
    with pytest.raises(BadCorpus, match="no row has a field named text; the rows have _id, body, title, url: map one"):
        read(path)
    path = write_lines(tmp_path / "d.jsonl", {"doc": "1", "text": "x"})
    with pytest.raises(BadCorpus, match="no id in field _id; the row has doc, text"):
        read(path)


def test_columns_are_reported_and_the_mapping_names_the_used_ones(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "c.jsonl", {"_id": "1", "text": "x", "kind": "drug"}, {"_id": "2", "text": "x", "url": "y"}
    )
    columns: set[str] = set()
    with no_ids() as ids:
        list(read_corpus([path], FieldMap(), Rejects(None), ids, columns=columns))
    assert columns - FieldMap().used_names() == {"kind", "url"}
    assert columns - FieldMap(metadata_fields=("kind",)).used_names() == {"url"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", b'[{"_id": "1", "text": "x"}]', r"one JSON array, write a line for each document: jq -c '\.\[\]'"),
        ("c.json", b'[\n  {"_id": "1", "text": "x"}\n]', r"one JSON array, write a line for each document"),
        ("c.json", b'{\n  "_id": "1",\n  "text": "x"\n}', r"several lines, write a line for each document: jq -c \."),
        ("c.csv", b"_id;title;text\n1;t;x\n", "columns are separated by ;; write it with commas"),
        ("c.csv", b"_id\ttitle\ttext\n1\tt\tx\n", "columns are separated by tabs; write it with commas"),
        (
            "c.csv",
            "_id,text\n1,高血压的治疗\n".encode("gbk"),
            "it reads as GBK: convert the file with iconv",
        ),
        ("c.csv", "_id,text,科室\n1,x,y\n".encode("gbk"), "its first line is not UTF-8 .* it reads as GBK"),
        ("c.jsonl", '{"_id": "1", "text": "高血压，a"}'.encode("gbk"), "it reads as GBK"),
        ("c.jsonl", '{"_id": "1", "text": "x"}'.encode("utf-16"), "it begins as UTF-16 does"),
        (
            "c.jsonl",
            gzip.compress(b'{"_id": "1", "text": "x"}', mtime=0),
            r"it begins as gzip does: let .* end in \.gz",
        ),
        ("c.jsonl", '{"_id": "1", "text": "café"}'.encode("latin-1"), r"not UTF-8 \(byte 26\)\. Correct"),
    ],
)
def test_the_error_for_another_known_format_says_how_to_convert_it(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadCorpus, match=message):
        read(tmp_path / name)


def test_a_link_that_leads_nowhere_is_reported(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "away" / "b.jsonl")
    with pytest.raises(BadCorpus, match=r"b\.jsonl cannot be read to its end .*No such file"):
        read(tmp_path)


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "closed").mkdir(parents=True)
    file = write_lines(folder / "corpus-file.jsonl", GOOD)
    file.chmod(0)
    (folder / "closed").chmod(0)
    above = (tmp_path, *tmp_path.parents)
    modes = {path: path.stat().st_mode for path in above if not path.stat().st_mode & 0o001}
    before = os.geteuid()
    try:
        for path in modes:
            path.chmod(0o755)
        if before == 0:  # root can read everything
            os.seteuid(65534)
        with pytest.raises(BadCorpus, match=r"corpus-file\.jsonl may not be read by this user"):
            list(read_rows(file))
        with pytest.raises(BadCorpus, match=r"closed may not be read by this user"):
            find_files([folder])
    finally:
        os.seteuid(before)
        for path, mode in modes.items():
            path.chmod(mode)
        (folder / "closed").chmod(0o755)


@pytest.mark.parametrize("name", ["", "n" * 201])
def test_a_field_name_that_filters_cannot_express_makes_a_bad_row(tmp_path: Path, name: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", GOOD | {"metadata": {name: "x"}})
    with pytest.raises(BadCorpus, match=f"name has {len(name)} characters; give it 1 to 200"):
        read(path)


def test_an_id_that_a_url_cannot_express_makes_a_bad_row(tmp_path: Path) -> None:
    """Its document could not be deleted through the service."""
    bad = [GOOD | {"_id": name} for name in ("a\nb", ".", "..", "头" * 342, "\u200b")]
    path = write_lines(
        tmp_path / "c.jsonl", *bad, GOOD, GOOD | {"_id": "..."}, GOOD | {"_id": "头" * 341}, GOOD | {"_id": "\ue000"}
    )
    documents, rejected = read_skipping(path, tmp_path / "rejects.jsonl")
    assert [document.id for document in documents] == ["a", "...", "头" * 341, "\ue000"]
    assert "the id 'a\\nb' has a control character" in rejected[0]["reason"]
    assert rejected[3]["reason"].endswith("头'… has 1,026 bytes, and at most 1,024 are allowed")
    assert [row["line"] for row in rejected] == [1, 2, 3, 4, 5]


def test_the_error_for_parquet_without_its_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "corpus.parquet").touch()
    with pytest.raises(BadCorpus, match=r"care-search\[parquet\]"):
        list(read_rows(tmp_path / "corpus.parquet"))
